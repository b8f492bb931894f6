#!/usr/bin/env bash
# The same as a Slurm job on two machines of 8 GPUs; a job that is requeued goes on by itself.
#
#   KERAS_BACKEND=jax sbatch examples/distributed/slurm.sh DATA RUN [OPTIONS]

#SBATCH --job-name=aiayn
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --signal=INT@120

set -euo pipefail
# Slurm runs a copy of this file: the others lie where the job was submitted.
here=${AIAYN_EXAMPLES:-$SLURM_SUBMIT_DIR/examples}/distributed
HOSTS=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)
export HOSTS
srun bash -c 'RANK=$SLURM_PROCID exec "$0" "$@"' "$here/machines.sh" "$@"
