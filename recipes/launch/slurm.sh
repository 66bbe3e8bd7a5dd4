#!/usr/bin/env bash
# SLURM: two nodes of eight GPUs; the job queues itself again before its time is over or when it is preempted.
#
#   sbatch recipes/launch/slurm.sh RECIPE MODEL RUN [options of `supra train`, such as --set strategy=fsdp2]
#
# MODEL, RUN and $SUPRA_CACHE must lie on a disk that all nodes share. Adapt the numbers below and add what your cluster
# wants: partition, account, and whatever makes `torchrun` known (source .venv/bin/activate). A run that fails stays so.
#SBATCH --job-name=supra
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=supra-%j.log
#SBATCH --signal=B:USR1@120
set -euo pipefail

recipe=$1 model=$2 run=$3
shift 3

# Two minutes before the time is over SLURM tells this script; what came after the last checkpoint is done again.
trap 'scontrol requeue "$SLURM_JOB_ID"; exit' USR1

resume=()
if [[ -e $run/run.json ]]; then resume=(--resume); fi
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# In the background, because a trap waits for what runs in the foreground.
srun --cpus-per-task "$SLURM_CPUS_PER_TASK" torchrun --nnodes "$SLURM_NNODES" --nproc-per-node gpu \
  --rdzv-backend c10d --rdzv-endpoint "${hosts[0]}:29500" --rdzv-id "$SLURM_JOB_ID" \
  -m supra train "$recipe" --model "$model" -o "$run" "${resume[@]}" "$@" &
wait $!
