#!/usr/bin/env bash
# WMT14, English to French, the paper's task: from the data to BLEU on newstest2014 (Table 2).
#
#   examples/wmt14_en_fr/run.sh [OPTIONS of `keras-aiayn train`]
#
# WORK    where everything goes (wmt14_en_fr): some 40 GB, and 70 for the checkpoints of big
# MODEL   base, the default, or big
# DEVICES GPUs of this machine to use (1); 8 make it the paper's run
# PARTS   that each GPU makes its share of an update of 25,000 + 25,000 tokens in (8 / DEVICES): one
#         GPU does, one part after the other, what the paper's 8 did side by side. A run keeps its
#         PARTS: to go on with other DEVICES, say both. TensorFlow takes DEVICES of 1 or 8

source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
work=${WORK:-wmt14_en_fr}
statmt=${STATMT:-http://www.statmt.org}
statmt_data=${STATMT_DATA:-http://data.statmt.org}
devices=${DEVICES:-1}
parts=${PARTS:-$(((7 + devices) / devices))}
mkdir -p "$work"
cd "$work"

for archive in wmt13/training-parallel-europarl-v7.tgz wmt13/training-parallel-commoncrawl.tgz \
  wmt13/training-parallel-un.tgz wmt14/training-parallel-nc-v9.tgz \
  wmt10/training-giga-fren.tar wmt14/test-full.tgz; do
  fetch "$statmt/$archive"
done
fetch "$statmt_data/wmt17/translation-task/dev.tgz"

corpora=(training/europarl-v7.fr-en commoncrawl.fr-en un/undoc.2000.fr-en
  training/news-commentary-v9.fr-en giga-fren.release2.fixed)
unpack training-parallel-europarl-v7.tgz "${corpora[0]}.fr"
unpack training-parallel-commoncrawl.tgz "${corpora[1]}.fr"
unpack training-parallel-un.tgz "${corpora[2]}.fr"
unpack training-parallel-nc-v9.tgz "${corpora[3]}.fr"
for language in en fr; do
  unpack training-giga-fren.tar "${corpora[4]}.$language.gz"
  unpack "${corpora[4]}.$language.gz" "${corpora[4]}.$language"
done
unpack dev.tgz dev/newstest2013.fr
unpack test-full.tgz test-full/newstest2014-fren-ref.fr.sgm
segments test-full/newstest2014-fren-src.en.sgm > newstest2014.en
segments test-full/newstest2014-fren-ref.fr.sgm > newstest2014.fr

files=()
for corpus in "${corpora[@]}"; do
  files+=(--train-source "$corpus.en" --train-target "$corpus.fr")
done
prepared data "${files[@]}" --vocabulary-size "${VOCABULARY:-32000}" \
  --valid-source dev/newstest2013.en --valid-target dev/newstest2013.fr

# Checkpoints every ten minutes; the mean of the last 5 of base, of the last 20 of big (6.1).
# Dropout is 0.1 for big, too, in this direction.
average=5
if [ "${MODEL:-base}" = big ]; then
  average=20
fi
trained run --data data --config "${MODEL:-base}" --tokens-per-batch 25000 \
  --devices "$devices" --set accumulation="$parts" --set dtype=mixed_bfloat16 --set dropout=0.1 \
  --set checkpoint_every=0 --set checkpoint_minutes=10 --set keep_last=$average --average $average "$@"

# Tokenised, compounds split, is the paper's; sacreBLEU comes out 0.7 to 1.0 lower.
keras-aiayn evaluate run/model.keras --source newstest2014.en --target newstest2014.fr \
  --paper-bleu --language fr
