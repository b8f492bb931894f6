"""The four token ids that every tokenizer, batch, loss and search agrees on."""

PAD = 0
UNK = 1
BOS = 2
EOS = 3
