#!/usr/bin/env bash
# Multi30k, English to German, from the data to BLEU on test_2016_flickr.
#
#   examples/multi30k/run.sh [OPTIONS of `keras-aiayn train`]
#
# WORK    where everything goes (multi30k)
# The data: github.com/multi30k/dataset, for non-commercial research; $AIAYN_DATA/multi30k, if set.

source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
work=${WORK:-multi30k}
base=${MULTI30K:-https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw}
mkdir -p "$work"
cd "$work"

text=${have:+$have/multi30k}
if [ -z "$text" ]; then
  text=.
  for split in train val test_2016_flickr; do
    for language in en de; do
      fetch "$base/$split.$language.gz"
      unpack "$split.$language.gz" "$split.$language"
    done
  done
fi

prepared data --vocabulary-size "${VOCABULARY:-8000}" \
  --train-source "$text/train.en" --train-target "$text/train.de" \
  --valid-source "$text/val.en" --valid-target "$text/val.de"

# The published run (41.02, tokenised and lower-cased, beam 5) made 8,000 updates of 2 x 4,096
# tokens, dropout 0.3, the mean of the last 10 checkpoints. On two CPU cores that is some 2.5 hours.
trained run --data data --config tiny --steps 8000 --tokens-per-batch 8192 \
  --set warmup_steps=1000 --set evaluate_every=500 --set checkpoint_every=250 \
  --set keep_last=10 --average 10 "$@"

test=(--source "$text/test_2016_flickr.en" --target "$text/test_2016_flickr.de")
keras-aiayn evaluate run/model.keras "${test[@]}" --beam 5
keras-aiayn evaluate run/model.keras "${test[@]}" --beam 5 --lowercase --paper-bleu
