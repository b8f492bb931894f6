#!/usr/bin/env bash
# The base model of the paper on all GPUs of this machine, on any backend; goes on by itself.
#
#   KERAS_BACKEND=jax examples/distributed/one_machine.sh DATA RUN [OPTIONS of `keras-aiayn train`]
#
# DATA    a folder made by `keras-aiayn prepare`
# RUN     the folder of the run

set -euo pipefail
data=$1 run=$2
shift 2
resume=()
if [ -f "$run/config.json" ]; then resume=(--resume); fi
exec keras-aiayn train --data "$data" --output "$run" ${resume[@]+"${resume[@]}"} \
  --config base --tokens-per-batch 25000 --set dtype=mixed_bfloat16 --average 5 "$@"
