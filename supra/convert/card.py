"""The small files that make a converted folder complete: configuration, supra.json, index and model card."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from supra.config import Conversion
from supra.convert.plan import Plan
from supra.convert.render import human_bytes, position_data
from supra.convert.shard_writer import HASH_NAME
from supra.convert.student import describe_positions
from supra.weights.headers import INDEX_NAME

CARD = """---
library_name: transformers
tags: [supra, linear-attention, rnn]
{base_model}---

# {title}

A Transformer whose softmax attention was replaced by linear recurrent attention (the SUPRA method,
[arXiv 2405.06640](https://arxiv.org/abs/2405.06640)). It generates with a recurrent state of constant size.

**This is where training starts, not a finished model.** Every weight of the teacher is kept bit for bit; the
{added:,} new parameters ({percent:.2f} % of the teacher's) have their starting values. Before training, its
text makes little sense.

| | |
|---|---|
| teacher | `{teacher}` ({model_type}) |
| layers | {linear} linear, {softmax} softmax |
| feature map | `{feature_map}`{dims}, rotary positions {rope_position} it |
| positions | {positions} |
| decay | `{decay}`{shared} |
| normalisation | `{norm}` |
| softmax window | {window} |
| dtype | {dtype} |
| seed of the new parameters | {seed} |

Memory of the context:

| tokens | teacher's KV cache | this model |
|---:|---:|---:|
{context}
{ranking}
## How to load

```python
import supra  # registers the architecture with transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH/TO/THIS/FOLDER")
tokenizer = AutoTokenizer.from_pretrained("PATH/TO/THIS/FOLDER")
```

## How to train

```
supra train hedgehog-window --model PATH/TO/THIS/FOLDER
```

`recipe.yaml` holds the options of the conversion and `supra.json` its versions, source and hashes.

## Licence

{licence}
"""


def write_small_files(plan: Plan, out: Path, *, seed: int, recipe_yaml: str, hashes: dict[str, Any]) -> None:
    """Write everything but the weights and their index into `out`."""
    plan.source.write_small_files(out)
    plan.config.save_pretrained(out)
    if not (out / "generation_config.json").exists():
        from transformers import GenerationConfig

        GenerationConfig.from_model_config(plan.config).save_pretrained(out)
    (out / "recipe.yaml").write_text(recipe_yaml, encoding="utf-8")
    _write_json(out / "supra.json", provenance(plan, seed, hashes))
    (out / "README.md").write_text(model_card(plan, seed, out), encoding="utf-8")


def provenance(plan: Plan, seed: int, hashes: dict[str, Any]) -> dict[str, Any]:
    """What supra.json holds: versions, source and its hashes, seed, conversion and sizes."""
    import torch
    import transformers

    import supra

    source = plan.source
    return {
        "versions": {
            "supra": supra.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "source": {"kind": source.kind, "location": source.location, "revision": source.revision},
        "hash": HASH_NAME,
        **hashes,
        "seed": seed,
        "conversion": plan.conversion.model_dump(mode="json"),
        "positions": position_data(plan.config),
        "dtype": plan.dtype,
        "parameters": {"kept": plan.parameters_kept, "added": plan.parameters_added},
        "dropped": [tensor.name for tensor in plan.dropped],
        "layer_errors": [error._asdict() for error in plan.layer_errors],
    }


def write_index(plan: Plan, out: Path, files: Mapping[str, str]) -> None:
    """Write the index from every tensor that counts to its file; `files` maps tensor names to file names."""
    kept = {tensor.name for tensor in (*plan.kept, *plan.new)}
    total = sum(tensor.num_bytes for tensor in (*plan.kept, *plan.new))
    weight_map = {name: file for name, file in sorted(files.items()) if name in kept}
    _write_json(out / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def model_card(plan: Plan, seed: int, out: Path) -> str:
    """The README.md of a converted folder."""
    conversion, layers = plan.conversion, list(plan.config.layer_types or [])
    linear = layers.count("linear_attention")
    rows = []
    for row in plan.context_bytes:
        teacher, student = human_bytes(row["teacher_kv_cache_bytes"]), human_bytes(row["student_bytes"])
        rows.append(f"| {row['num_tokens']:,} | {teacher} | {student} |")
    has_licence = any(out.glob("LICENSE*"))
    licence = (
        "The teacher's licence, copied beside this card, holds for its weights in here."
        if has_licence
        else "Unknown: the teacher's folder holds none. It covers the weights in here: look it up."
    )
    name = plan.source.location if plan.source.kind == "hub" else Path(plan.source.location).name
    return CARD.format(
        base_model=f"base_model: {name}\n" if plan.source.kind == "hub" else "",
        title=f"{name}, linearised",
        added=plan.parameters_added,
        percent=100 * plan.parameters_added / max(plan.parameters_kept, 1),
        teacher=name,
        model_type=plan.config.teacher_model_type,
        linear=linear,
        softmax=len(layers) - linear,
        feature_map=conversion.feature_map,
        dims=f" of {conversion.taylor_dim} dimensions" if conversion.taylor_dim else "",
        rope_position=conversion.rope_position,
        positions=describe_positions(plan.config),
        decay=conversion.decay,
        shared=", shared within each key/value group" if conversion.decay_shared else "",
        norm=conversion.norm,
        window=_window(conversion),
        dtype=plan.dtype,
        seed=seed,
        context="\n".join(rows),
        ranking=_ranking(plan),
        licence=licence,
    )


def _ranking(plan: Plan) -> str:
    """By what the softmax layers were chosen, as a section of the card."""
    if not plan.layer_errors:
        return ""
    lines = [
        "",
        "## Layers by what they lose",
        "",
        "Relative squared error of a layer's attention after a short transfer of that layer alone; those with the",
        "largest stay softmax.",
        "",
        "| layer | error | becomes |",
        "|---:|---:|---|",
    ]
    kept = plan.conversion.keep_softmax
    lines += [
        f"| {i} | {error:.4f} | {'softmax' if i in kept else 'linear'} |" for i, error in plan.layer_errors
    ]
    return "\n".join(lines) + "\n"


def _window(conversion: Conversion) -> str:
    """The tokens that stay exact, in words."""
    if not conversion.window:
        return "none"
    sinks = f", and the first {conversion.num_sink_tokens}" if conversion.num_sink_tokens else ""
    return f"the last {conversion.window} tokens{sinks}"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
