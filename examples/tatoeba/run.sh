#!/usr/bin/env bash
# Tatoeba, English to German: everyday sentences, from the data to BLEU on 1,500 held-out ones.
#
#   examples/tatoeba/run.sh [OPTIONS of `keras-aiayn train`]
#
# WORK    where everything goes (tatoeba)
# The data: tatoeba.org, CC BY 2.0 FR, as aligned by OPUS; $AIAYN_DATA/tatoeba_ende, if set.

source "$(dirname "${BASH_SOURCE[0]}")/../recipe.sh"
work=${WORK:-tatoeba}
base=${TATOEBA:-https://object.pouta.csc.fi/OPUS-Tatoeba/v2023-04-12/moses}
mkdir -p "$work"
cd "$work"

text=${have:+$have/tatoeba_ende}
if [ -z "$text" ]; then
  text=.
  fetch "$base/de-en.txt.zip"
  unpack de-en.txt.zip Tatoeba.de-en.en
  # One sentence has many translations: all pairs of an English one go to the same side.
  if [ ! -f train.de ]; then
    paste Tatoeba.de-en.en Tatoeba.de-en.de | LC_ALL=C sort -u | awk -F '\t' '
      NF != 2 { next }
      $1 != last { last = $1; source++; held = source % 100 == 0 && pairs < 1500 }
      held { print $1 > "dev.en"; print $2 > "dev.de"; pairs++; next }
      { print $1 > "train.en"; print $2 > "train.de.part" }'
    mv train.de.part train.de
  fi
fi

prepared data --vocabulary-size "${VOCABULARY:-8000}" \
  --train-source "$text/train.en" --train-target "$text/train.de" \
  --valid-source "$text/dev.en" --valid-target "$text/dev.de"

trained run --data data --config small --steps 20000 --tokens-per-batch 4096 \
  --set warmup_steps=2000 --set evaluate_every=1000 --set evaluate_lines=500 \
  --set checkpoint_every=500 --average 5 "$@"

keras-aiayn evaluate run/model.keras --source "$text/dev.en" --target "$text/dev.de"
