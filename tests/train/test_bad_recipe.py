"""Mistakes in a recipe or a training command: each gives one clear error and leaves nothing half-written."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from supra import config
from supra.config import Recipe
from supra.errors import UserError
from supra.train.trainer import run_training

OVERRIDES = [
    # what is written, what the error must say
    ("conversion.feature_map=hedgehg", ["conversion.feature_map", "'hedgehg'", "did you mean `hedgehog`"]),
    ("conversion.windw=3", ["conversion.windw", "did you mean `window`"]),
    ("conversion.window=-1", ["conversion.window = -1", "at least 0"]),
    ("conversion.window=big", ["conversion.window = 'big'", "a number is needed"]),
    ("conversion.norm=group_norm", ["conversion.window = 64", "set norm to denominator"]),
    ("conversion.rope_position=after", ["conversion.rope_position = 'after'", "set rope_position to before"]),
    ("conversion.rope=before", ["conversion.rope = 'before'", "is called rope_position"]),  # an older recipe
    ("conversion.rope=dynamic:4", ["conversion.rope = 'dynamic:4'", "cannot be rotated again"]),
    ("conversion.rope=4", ["conversion.rope = 4", "must be text"]),
    ("conversion.taylor_dim=16", ["conversion.taylor_dim = 16", "set feature_map to taylor"]),
    ("conversion={feature_map: taylor, taylor_dim: 5}", ["conversion.taylor_dim = 5", "give an even number"]),
    ("conversion={feature_map: taylor, rope_position: after}", ["set rope_position to before"]),
    ("conversion.decay=gate", ["conversion.decay = 'gate'", "did you mean `gated`"]),
    ("conversion.num_sink_tokens=-1", ["conversion.num_sink_tokens", "at least 0"]),
    (
        "conversion={feature_map: elu, num_sink_tokens: 1, window: 0}",
        ["conversion.num_sink_tokens", "set window"],
    ),
    ("conversion.keep_softmax=0,x", ["conversion.keep_softmax.1 = 'x'", "a number is needed"]),
    ("conversion.decay_shared=true", ["conversion.decay_shared", "no decay to share"]),
    ("stages.0.lr=1e-3", ["stages.transfer.lr", "belongs in `stages.optimizer`"]),
    ("stages.0.positions=pose:512", ["stages.transfer.positions = 'pose:512'", "fewer than the 1024 tokens"]),
    ("stages.0.positions=posed:4096", ["stages.transfer.positions", "random:N or pose:N"]),
    ("stages.0.positions=random:-1", ["stages.transfer.positions", "random:N or pose:N"]),
    ("stages.0.positions=4096", ["stages.transfer.positions = 4096", "must be text"]),
    ("stages.0.optimizer.lr=-1", ["stages.transfer.optimizer.lr = -1", "greater than 0"]),
    ("stages.0.optimizer.lr=.nan", ["stages.transfer.optimizer.lr", "finite number"]),
    ("stages.0.optimizer.lr=true", ["stages.transfer.optimizer.lr = True", "not true/false"]),
    ("stages.0.optimizer.schedule=cosin", ["did you mean `cosine`"]),
    (
        "stages.0.optimizer.warmup_steps=9999",
        ["optimizer.warmup_steps = 9999", "within the stage"],
    ),
    ("stages.0.optimizer.decay_ratio=0.5", ["optimizer.decay_ratio = 0.5", "schedule: wsd"]),
    ("stages.0.optimizer={lr: 1, schedule: wsd, decay_ratio: 0}", ["decay_ratio = 0", "greater than 0"]),
    (
        "stages.0.optimizer={lr: 1, schedule: wsd, decay_ratio: 1, warmup_steps: 1}",
        ["stages.transfer.optimizer.decay_ratio = 1", "1 warm-up and", "exceed the stage's"],
    ),
    ("stages.0.optimizer.betas=[0.9]", ["stages.transfer.optimizer.betas"]),
    ("stages.0.trainable=all", ["stages.transfer.loss", "new or adapters"]),
    ("stages.1.loss=attention_weights", ["stages.distill.loss", "set trainable to new"]),
    ("stages.0.lora.rank=4", ["stages.transfer.lora", "trainable: adapters"]),
    ("stages.0.kl_temperature=2", ["stages.transfer.kl_temperature", "loss: kl"]),
    ("stages.0.ce_weight=0.5", ["stages.transfer.ce_weight", "loss: kl"]),
    ("stages.1.ce_weight=1", ["stages.distill.ce_weight = 1", "less than 1"]),
    ("stages.0.activation_checkpointing=true", ["stages.transfer.activation_checkpointing", "one layer's"]),
    (
        "stages.0.activation_checkpointing=maybe",
        ["stages.transfer.activation_checkpointing", "true or false"],
    ),
    ("stages.0.window_dropout=0.5", ["stages.transfer.window_dropout = 0.5", "mapping of fields"]),
    ("stages.0.window_dropout={end: 0}", ["stages.transfer.window_dropout.start", "required"]),
    ("stages.0.window_dropout={start: 1.5}", ["window_dropout.start = 1.5", "at most 1"]),
    ("stages.0.ema=1", ["stages.transfer.ema = 1", "less than 1"]),
    ("stages.1.lora.targets=[q_proj, gateproj]", ["lora.targets.1", "did you mean `gate_proj`"]),
    (
        "stages.1={name: a, trainable: adapters, loss: attention, length: 8, tokens_per_step: 8,"
        " total_tokens: 8, optimizer: {lr: 1}, lora: {targets: [q_proj, up_proj]}}",
        ["stages.a.lora.targets", "does not reach up_proj"],
    ),
    ("stages.0.tokens_per_step=1000", ["stages.transfer.tokens_per_step = 1000", "nearest is 1024"]),
    ("stages.0.total_tokens=10", ["stages.transfer.total_tokens = 10", "less than one step"]),
    ("stages.0.length=2.5", ["stages.transfer.length = 2.5", "whole number"]),
    ("stages.1.name=transfer", ["stages", "share the name transfer"]),
    ("stages.0.name=two words", ["one word"]),
    ("stages.trnsfer.length=8", ["stages.trnsfer", "Did you mean `transfer`"]),
    ("stages.7.length=8", ["stages.7", "no entry 7"]),
    ("stages=[]", ["stages = []", "at least 1"]),
    ("data.train=[]", ["data.train = []", "at least 1"]),
    ("data.train=some.txt", ["data.train = 'some.txt'", "must be a list"]),
    ("data.format=csv", ["data.format = 'csv'", "must be one of"]),
    ("data.mixture=[{train: [a.txt], weight: 1}]", ["data.train", "used only without `mixture`"]),
    ("data={mixture: [{train: [a.txt]}]}", ["data.mixture.0.weight: required"]),
    ("data={mixture: [{train: [a.txt], weight: 0}]}", ["data.mixture.0.weight = 0", "greater than 0"]),
    ("data={mixture: [{train: [], weight: 1}]}", ["data.mixture.0.train = []", "at least 1"]),
    ("data={mixture: [{train: [a.txt], wieght: 1}]}", ["data.mixture.0.wieght", "did you mean `weight`"]),
    (
        "data={mixture: [{train: [a], weight: 0.123456789}, {train: [b], weight: 1}]}",
        ["data.mixture", "add up to at most 100,000: round them"],
    ),
    ("data={heldout: [a.txt]}", ["data.train: must hold at least 1", "mixture"]),
    ("data.messages_field=messages", ["data.messages_field = 'messages'", "format: text"]),
    ("data={train: [a], unwrap: true, messages_field: m}", ["data.messages_field", "plain text"]),
    ("data.streaming=true", ["data.streaming = True", "leave out max_tokens"]),
    ("data.min_document_tokens=0", ["data.min_document_tokens = 0", "greater than 0"]),
    ("data.min_document_tokens=3e6", ["data.min_document_tokens", "more than max_tokens = 2000000"]),
    ("seed=-3", ["seed = -3", "at least 0"]),
    ("data.documents=first", ["data.documents = 'first'", "even"]),
    ("stages.0.optimizer.moments=fp8", ["stages.transfer.optimizer.moments", "int8"]),
    ("teacher_weights=int4", ["teacher_weights = 'int4'", "nf4"]),
    ("dtype=bf16", ["dtype = 'bf16'", "did you mean `bfloat16`"]),
    ("name", ["--set", "field.path=value"]),
    ("seed.deeper=1", ["seed.deeper", "is a value, it has no fields"]),
]


@pytest.mark.parametrize(("override", "expected"), OVERRIDES, ids=[override for override, _ in OVERRIDES])
def test_a_wrong_field_is_named(override: str, expected: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        config.load("demo", [override])
    for part in expected:
        assert part in str(caught.value)
    assert caught.value.exit_code == 2


def test_all_errors_at_once() -> None:
    wrong = ["sed=1", "dtype=half", "stages.0.length=x", "stages.1.optimizer.lr=0", "stages.nope.lr=1"]
    with pytest.raises(UserError) as caught:
        config.load("demo", wrong)
    text = str(caught.value)
    assert "5 errors" in text
    for part in ("sed", "dtype", "stages.transfer.length", "stages.distill.optimizer.lr", "stages.nope"):
        assert part in text


FILES = {
    "syntax": (b"name: x\nstages:\n  - name: a\n   loss: kl\n", ["not valid YAML", "line 4"]),
    "tab": (b"name: x\n\tseed: 1\n", ["not valid YAML", "line 2"]),
    "twice": (b"name: x\nseed: 1\nseed: 2\n", ["`seed` is written twice", "line 3"]),
    "empty": (b"", ["this is empty"]),
    "list": (b"- a\n- b\n", ["this is a list"]),
    "binary": (b"\xff\xfe\x00\x01", ["not UTF-8"]),
    "missing": (b"name: x\n", ["2 errors", "data: required", "stages: required"]),
    "python": (b"name: !!python/object/apply:os.system [ls]\n", ["not valid YAML"]),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_broken_file(kind: str, tmp_path: Path) -> None:
    content, expected = FILES[kind]
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        config.load(path)
    for part in expected:
        assert part in str(caught.value)
    assert "bad.yaml" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"), [("dmo", "Did you mean demo"), ("x/y.yaml", "no such file"), (".", "folder")]
)
def test_no_such_recipe(name: str, hint: str) -> None:
    with pytest.raises(UserError, match=hint):
        config.load(name)


class Case:
    """What a run starts from; a case of `RUNS` changes it."""

    def __init__(self, tiny: ModuleType, tmp_path: Path, text: Path, model: Path) -> None:
        self.tiny, self.tmp, self.text, self.model = tiny, tmp_path, text, model
        self.raw: dict[str, Any] = tiny.raw_recipe(text)

    def data(self, **changes: Any) -> "Case":
        self.raw["data"].update(changes)
        return self

    def file(self, name: str, *lines: str) -> "Case":
        path = self.tmp / name
        path.write_text("\n".join(lines))
        return self.data(train=[str(path)])

    def bytes(self, name: str, content: bytes) -> "Case":
        (self.tmp / name).write_bytes(content)
        return self.data(train=[str(self.tmp / name)])

    def set(self, **changes: Any) -> "Case":
        self.raw.update(changes)
        return self

    def on(self, model: Path) -> "Case":
        self.model = model
        return self


RUNS: dict[str, tuple[Callable[[Case], Case], str]] = {
    "no text": (lambda c: c.data(train=[str(c.tmp / "trian.txt")]), "no file matches"),
    "near text": (lambda c: c.data(train=[str(c.text.with_name("trian.txt"))]), "Did you mean train.txt"),
    "folder": (lambda c: c.data(train=[str(c.tmp)]), "it is a folder"),
    "empty text": (lambda c: c.file("e.txt", " "), "hold no text"),
    "short text": (lambda c: c.file("s.txt", "a cat"), "less than one sequence"),
    "package": (lambda c: c.data(train=["package:no_such_pkg/a.txt"]), "pip install --no-deps no-such-pkg"),
    "all held out": (lambda c: c.data(heldout=[str(c.text)]), "held out or excluded"),
    "unknown format": (lambda c: c.file("a.csv", "x"), "cannot tell its format"),
    "bad json": (lambda c: c.file("a.jsonl", '{"text": "a"}', "{"), "a.jsonl line 2"),
    "latin-1 rows": (lambda c: c.bytes("a.jsonl", b'{"text": "caf\xe9"}'), "a.jsonl: is not UTF-8"),
    "no field": (lambda c: c.file("a.jsonl", '{"txt": "a"}'), "did you mean txt"),
    "not text": (lambda c: c.file("a.jsonl", '{"text": 3}'), "field text is int"),
    "bad parquet": (lambda c: c.file("a.parquet", "x"), "not a parquet file"),
    "no model": (lambda c: c.on(c.tmp / "nowhere"), "does not exist"),
    "other conversion": (
        lambda c: c.set(conversion={"feature_map": "hedgehog", "window": 8}),
        "conversion.window is 8, the model's is 4",
    ),
    "nothing new to train": (
        lambda c: c.set(conversion={"feature_map": "elu"}).on(
            c.tiny.write_model(c.tmp / "elu", feature_map="elu", window=0)
        ),
        "no new parameter",
    ),
    "no window to drop": (
        lambda c: c.set(
            conversion={"feature_map": "hedgehog"}, stages=[c.tiny.stage(window_dropout={"start": 0.5})]
        ).on(c.tiny.write_model(c.tmp / "plain", window=0)),
        "stages.transfer.window_dropout: the model has no window",
    ),
    "unknown backend": (lambda c: c.set(backend="magic"), "magic"),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_that_cannot_start(
    kind: str, tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path
) -> None:
    change, expected = RUNS[kind]
    case = change(Case(tiny, tmp_path, text_file, model_dir))
    with pytest.raises(UserError) as caught:
        run_training(Recipe.model_validate(case.raw), case.model, tmp_path / "run")
    assert expected in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_run_folder_misuse(tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path) -> None:
    run_dir = tmp_path / "run"

    def train(raw: dict[str, Any], model: Path = model_dir, resume: bool = False) -> None:
        run_training(Recipe.model_validate(raw), model, run_dir, resume=resume)

    raw = tiny.raw_recipe(text_file)
    with pytest.raises(UserError, match="no run to resume"):
        train(raw, resume=True)
    assert not run_dir.exists()
    train(raw)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="not empty"):
        train(raw)
    with pytest.raises(UserError) as caught:
        train(tiny.raw_recipe(text_file, tiny.stage(optimizer={"lr": 0.5}), seed=3), resume=True)
    assert "seed: 0 -> 3" in str(caught.value)
    assert "stages.0.optimizer.lr: 0.01 -> 0.5" in str(caught.value)
    with pytest.raises(UserError, match=r"data\.train\.0"):
        train(tiny.raw_recipe(tiny.write_text(tmp_path / "other.txt", seed=9)), resume=True)
    with pytest.raises(UserError, match="model to train changed"):
        train(raw, tiny.write_model(tmp_path / "other", rms_norm_eps=1e-5), resume=True)
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
