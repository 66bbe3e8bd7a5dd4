#!/usr/bin/env bash
# One machine, one process a GPU; run again, it goes on where the run stopped.
#
#   recipes/launch/torchrun.sh RECIPE MODEL RUN [options of `supra train`, such as --set strategy=fsdp2]
#
# PROCESSES: how many, where it is not one for each GPU (PROCESSES=2 with --set device=cpu runs on CPUs).
# The run says what it is before the first step: "8 processes · strategy fsdp2 · device cuda:0 · …".
set -euo pipefail

recipe=$1 model=$2 run=$3
shift 3

resume=()
if [[ -e $run/run.json ]]; then resume=(--resume); fi

exec torchrun --standalone --nproc-per-node "${PROCESSES:-gpu}" \
  -m supra train "$recipe" --model "$model" -o "$run" "${resume[@]}" "$@"
