#!/usr/bin/env bash
# The base model of the paper on several machines, on any backend; goes on by itself. To be started
# on each of them, where DATA and RUN are the same shared folders:
#
#   HOSTS=node-a,node-b RANK=0 KERAS_BACKEND=torch examples/distributed/machines.sh DATA RUN
#
# HOSTS   all machines, as each can be reached by the others, with :PORT or without (29400)
# RANK    the number of this one among them, from 0
# DATA, RUN and further options as of one_machine.sh

set -euo pipefail
data=$1 run=$2
shift 2
port=29400
workers=()
IFS=, read -ra hosts <<< "$HOSTS"
for host in "${hosts[@]}"; do
  case $host in
    *:*) workers+=("$host") ;;
    *) workers+=("$host:$port") ;;
  esac
done
resume=()
if [ -f "$run/config.json" ]; then resume=(--resume); fi
train=(train --data "$data" --output "$run" ${resume[@]+"${resume[@]}"}
  --config base --tokens-per-batch 25000 --set dtype=mixed_bfloat16 --average 5 "$@")

case ${KERAS_BACKEND:?must be tensorflow, jax or torch} in
  tensorflow)
    list=$(printf '"%s",' "${workers[@]}")
    export TF_CONFIG="{\"cluster\": {\"worker\": [${list%,}]}, \
      \"task\": {\"type\": \"worker\", \"index\": $RANK}}"
    exec keras-aiayn "${train[@]}"
    ;;
  jax)
    export JAX_COORDINATOR_ADDRESS=${workers[0]}
    export JAX_NUM_PROCESSES=${#workers[@]} JAX_PROCESS_ID=$RANK
    exec keras-aiayn "${train[@]}"
    ;;
  torch)
    gpus=$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')
    exec torchrun --nnodes "${#workers[@]}" --node-rank "$RANK" --nproc-per-node "$gpus" \
      --master-addr "${workers[0]%:*}" --master-port "${workers[0]##*:}" \
      --module keras_aiayn "${train[@]}"
    ;;
  *)
    echo "error: KERAS_BACKEND must be tensorflow, jax or torch. Received: $KERAS_BACKEND" >&2
    exit 2
    ;;
esac
