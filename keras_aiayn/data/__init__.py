"""From text files to batches: section 5.1 of the paper.

In the order in which a sentence passes through them: `corpus`, `tokenizer`, `prepared`,
`batching`; and `tasks`, data made up on the spot.
"""
