#!/usr/bin/env bash
# Several machines, one process a GPU: start it on each of them with the same arguments; run again, it goes on.
#
#   NODES=2 HEAD=host0 recipes/launch/torchrun-nodes.sh RECIPE MODEL RUN [options of `supra train`]
#
# NODES: how many machines. HEAD: one of them, where all meet (PORT 29500 unless given). PROCESSES: on each machine,
# where it is not one for each GPU. MODEL, RUN and $SUPRA_CACHE must lie on a disk that all machines share: the first
# process writes there, the others read.
set -euo pipefail

recipe=$1 model=$2 run=$3
shift 3

# All decide this before any of them writes: no process starts until every machine has come.
resume=()
if [[ -e $run/run.json ]]; then resume=(--resume); fi

exec torchrun --nnodes "$NODES" --nproc-per-node "${PROCESSES:-gpu}" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id "$(basename "$run")" \
  -m supra train "$recipe" --model "$model" -o "$run" "${resume[@]}" "$@"
