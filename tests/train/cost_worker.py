"""Prints as JSON what a recipe is foreseen to cost, or what it did cost: seconds of CPU time and bytes.

Usage: cost_worker.py (plan | train) RECIPE MODEL_DIR RUN_DIR
CPU time is what a quiet machine would take, also where others work beside it.
"""

import json
import resource
import sys
import time
from pathlib import Path

import torch

from supra import config
from supra.train import plan, probe, trainer


def main() -> None:
    what, recipe_path, model_dir, run_dir = sys.argv[1:]
    recipe = config.load(recipe_path)
    torch.set_num_threads(1)
    if what == "plan":
        probe.clock = time.process_time
        foreseen = plan.dry_run(recipe, model_dir, run_dir)
        found = {
            "seconds": foreseen.seconds,
            "memory": foreseen.measured_peak_bytes,
            "disk": foreseen.disk_bytes,
            "peak_disk": foreseen.peak_disk_bytes,
        }
        print(foreseen.to_json(), file=sys.stderr)
    else:
        start = time.process_time()
        trainer.run_training(recipe, model_dir, run_dir)
        found = {
            "seconds": time.process_time() - start,
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
            "disk": sum(path.stat().st_size for path in Path(run_dir).rglob("*") if path.is_file()),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
