"""The correctness contract, for every kind of linear layer: each test answers a fault users met elsewhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from supra.models import SupraCache, SupraForCausalLM

TOL = {"rtol": 1e-9, "atol": 1e-9}


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 96, shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=8)
@given(cuts=st.lists(st.integers(0, 19), max_size=5), seed=st.integers(0, 3))
def test_prefill_in_any_split_and_decode_equal_one_forward(
    model: SupraForCausalLM, cuts: list[int], seed: int
) -> None:
    ids = tokens(2, 19, seed=seed)
    whole = model(ids).logits
    cache, pieces = SupraCache(model.config), []
    # Without gradients the state changes in place and a single token takes the decode path.
    with torch.set_grad_enabled(bool(seed % 2)):
        for start, stop in pairwise([0, *sorted(set(cuts) - {0, 19}), 19]):
            pieces.append(model(ids[:, start:stop], cache=cache, use_cache=True).logits)
    assert_close(torch.cat(pieces, 1), whole, **TOL)
    assert cache.get_seq_length() == 19


@pytest.mark.parametrize("with_gradients", [False, True])
def test_one_token_at_a_time_equals_one_forward(model: SupraForCausalLM, with_gradients: bool) -> None:
    ids = tokens(2, 12)
    cache = SupraCache(model.config)
    with torch.set_grad_enabled(with_gradients):
        steps = [model(ids[:, i : i + 1], cache=cache, use_cache=True).logits for i in range(12)]
    assert_close(torch.cat(steps, 1), model(ids).logits, **TOL)


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Positions as generate() gives them: a pad does not count."""
    return (mask.cumsum(1) - 1).clamp(min=0)


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_pads_change_nothing_wherever_they_stand(model: SupraForCausalLM, side: str) -> None:
    lengths, width = [11, 4, 1, 7], 13
    rows = [tokens(1, n, seed=n) for n in lengths]
    ids, mask = torch.zeros(4, width, dtype=torch.long), torch.zeros(4, width, dtype=torch.long)
    for i, row in enumerate(rows):
        n = lengths[i]
        where = {"left": range(width - n, width), "right": range(n), "middle": range(1, n + 1)}[side]
        ids[i, list(where)], mask[i, list(where)] = row[0], 1
    output = model(ids, attention_mask=mask, position_ids=positions(mask)).logits
    # Without positions the linear layers do not count pads. A model of softmax layers only counts columns as its
    # teacher does: RoPE is relative, but its angles are fp32.
    derived = model(ids, attention_mask=mask).logits
    tolerance = 1e-8 if model.config.num_linear_layers else 1e-4
    for i, row in enumerate(rows):
        alone = model(row).logits[0]
        assert_close(output[i][mask[i].bool()], alone, rtol=1e-8, atol=1e-8)
        assert_close(derived[i][mask[i].bool()], alone, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_padded_prefill_then_decode_equals_unpadded(model: SupraForCausalLM) -> None:
    lengths = [9, 2, 5]
    rows = [tokens(1, n + 6, seed=n) for n in lengths]
    width = max(lengths)
    ids = torch.stack(
        [
            torch.cat((torch.zeros(width - n, dtype=torch.long), r[0, :n]))
            for n, r in zip(lengths, rows, strict=True)
        ]
    )
    mask = torch.stack([torch.cat((torch.zeros(width - n), torch.ones(n))) for n in lengths]).long()
    cache = SupraCache(model.config)
    # The prompt itself in two chunks: the first holds nothing but pads for the shortest row.
    where = positions(mask)
    model(ids[:, :5], attention_mask=mask[:, :5], position_ids=where[:, :5], cache=cache, use_cache=True)
    last = model(ids[:, 5:], attention_mask=mask, position_ids=where[:, 5:], cache=cache, use_cache=True)
    steps = [last.logits[:, -1:]]
    for i in range(6):
        mask = torch.cat((mask, mask.new_ones(3, 1)), 1)
        new = torch.stack([r[0, n + i] for n, r in zip(lengths, rows, strict=True)])[:, None]
        where = positions(mask)[:, -1:]
        steps.append(model(new, attention_mask=mask, position_ids=where, cache=cache, use_cache=True).logits)
    for i, (n, row) in enumerate(zip(lengths, rows, strict=True)):
        assert_close(torch.cat(steps, 1)[i], model(row).logits[0, n - 1 :], rtol=1e-8, atol=1e-8)


def test_a_pad_in_a_decode_step_changes_no_state(make_model) -> None:
    model = make_model(feature_map="relu", decay="alibi")
    ids = tokens(2, 6)
    cache, plain = SupraCache(model.config), SupraCache(model.config)
    model(ids, cache=cache, use_cache=True)
    model(ids, cache=plain, use_cache=True)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[1, 6] = 0
    model(tokens(2, 1, seed=5), attention_mask=mask, cache=cache, use_cache=True)
    assert torch.equal(cache.layers[0].recurrent_state[1], plain.layers[0].recurrent_state[1])
    assert not torch.equal(cache.layers[0].recurrent_state[0], plain.layers[0].recurrent_state[0])


def test_packed_documents_equal_the_same_documents_apart(model: SupraForCausalLM) -> None:
    lengths = [5, 1, 9, 3]
    documents = [tokens(1, n, seed=n) for n in lengths]
    # Two rows of nine columns each: documents 5+1+3 and 9.
    ids = torch.cat([documents[0], documents[1], documents[3], documents[2]], 1).view(2, 9)
    cu_seqlens = torch.tensor([0, 5, 6, 9, 18])
    packed = model(ids, cu_seqlens=cu_seqlens).logits.view(18, -1)
    order = [documents[0], documents[1], documents[3], documents[2]]
    for document, (start, stop) in zip(order, pairwise(cu_seqlens.tolist()), strict=True):
        assert_close(packed[start:stop], model(document).logits[0], **TOL)

    weights = torch.randn(18, model.config.vocab_size, dtype=packed.dtype)
    (packed * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for document, (start, stop) in zip(order, pairwise(cu_seqlens.tolist()), strict=True):
        (model(document).logits[0] * weights[start:stop]).sum().backward()
    assert gradients
    for name, parameter in model.named_parameters():
        assert_close(
            gradients[name],
            parameter.grad,
            rtol=1e-7,
            atol=1e-7,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    model.zero_grad()


GENERATIONS = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beam": {"num_beams": 3},
    "beam-sampling": {"num_beams": 2, "do_sample": True},
    "several": {"do_sample": True, "num_return_sequences": 3},
}


@pytest.mark.parametrize("kind", GENERATIONS)
def test_generate_with_cache_equals_without(model: SupraForCausalLM, kind: str) -> None:
    ids = tokens(2, 7)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    outputs = []
    for use_cache in (True, False):
        torch.manual_seed(1)
        outputs.append(
            model.generate(
                ids, attention_mask=mask, max_new_tokens=12, use_cache=use_cache, **GENERATIONS[kind]
            )
        )
    assert torch.equal(*outputs)


@pytest.mark.parametrize("option", [{"prompt_lookup_num_tokens": 2}, {"cache_implementation": "static"}])
def test_generation_that_needs_a_rollback_is_refused(make_model, option: dict) -> None:
    with pytest.raises(ValueError, match=r"stateful|cache_implementation"):
        make_model().generate(tokens(1, 5), max_new_tokens=4, **option)


def test_crop_is_refused_with_the_reason(make_model) -> None:
    model = make_model()
    cache = model(tokens(1, 5), use_cache=True).cache
    with pytest.raises(ValueError, match="cannot be cropped"):
        cache.crop(-1)


def test_state_size_is_the_same_after_1_and_200_tokens(make_model) -> None:
    model = make_model(
        feature_map="hedgehog", rope_position="before", attention_norm="denominator", decay="none", window=4
    )
    sizes = [model(tokens(1, n), use_cache=True).cache.num_bytes() for n in (5, 40, 200)]
    assert len(set(sizes)) == 1, sizes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_and_decay_are_fp32_whatever_the_weights(make_model, dtype: torch.dtype) -> None:
    model = make_model(dtype=torch.float32, feature_map="relu", decay="learned").to(dtype)
    cache = model(tokens(1, 9), use_cache=True).cache
    assert cache.layers[0].recurrent_state.dtype == torch.float32
    assert (
        make_model(feature_map="relu", decay="alibi")
        .linear_layers()[0]
        .decay(torch.zeros(1, dtype=dtype))
        .dtype
        == torch.float32
    )
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_then_load_is_bit_exact(model: SupraForCausalLM, tmp_path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    saved = type(model)(model.config)
    saved.load_state_dict(model.state_dict())
    saved.to(dtype).save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert isinstance(loaded, SupraForCausalLM)
    for name, tensor in loaded.state_dict().items():
        kept = saved.state_dict()[name]
        assert torch.equal(tensor.to(kept.dtype), kept), name
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()


def test_ablations_decode_as_they_read(make_model) -> None:
    fields = {
        "feature_map": "hedgehog",
        "rope_position": "before",
        "attention_norm": "denominator",
        "decay": "none",
    }
    model, ids = make_model(window=4, num_sink_tokens=1, **fields), tokens(1, 14)
    for branch in ("window_only", "linear_only"):
        with torch.no_grad(), model.ablation(branch):
            cache = SupraCache(model.config)
            steps = [model(ids[:, i : i + 1], cache=cache, use_cache=True).logits for i in range(14)]
            assert_close(torch.cat(steps, 1), model(ids).logits, **TOL)


def test_ablations_switch_one_branch_off_and_back(make_model) -> None:
    fields = {
        "feature_map": "hedgehog",
        "rope_position": "before",
        "attention_norm": "denominator",
        "decay": "none",
    }
    model, ids = make_model(window=4, **fields), tokens(1, 20)
    both = model(ids).logits
    with model.ablation("window_only"):
        window_only = model(ids).logits
    with model.ablation("linear_only"):
        linear_only = model(ids).logits
    assert torch.equal(model(ids).logits, both)
    assert_close(window_only[:, :4], both[:, :4], **TOL)  # nothing is older than the window yet
    assert not torch.allclose(window_only[:, 8:], both[:, 8:])
    without_window = make_model(window=0, **fields)
    without_window.load_state_dict(model.state_dict(), strict=False)
    assert_close(linear_only, without_window(ids).logits, **TOL)
    with (
        pytest.raises(ValueError, match="needs a model with a window"),
        without_window.ablation("window_only"),
    ):
        pass


def test_gradient_checkpointing_changes_no_gradient(model: SupraForCausalLM) -> None:
    ids = tokens(1, 10)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.activation_checkpointing_enable()
        model.train()
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    model.activation_checkpointing_disable()
    model.eval()
    model.zero_grad()
    for first, second in zip(*gradients, strict=True):
        assert_close(first, second, **TOL)


def test_a_wrong_cache_mask_or_packing_is_refused(make_model) -> None:
    from transformers import DynamicCache

    model, ids = make_model(), tokens(1, 4)
    with pytest.raises(ValueError, match="SupraCache"):
        model(ids, cache=DynamicCache())
    with pytest.raises(ValueError, match="2-D padding mask"):
        model(ids, attention_mask=torch.ones(1, 1, 4, 4))
    with pytest.raises(ValueError, match="rise from 0"):
        model(ids, cu_seqlens=torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="every row"):
        model(tokens(2, 4), cu_seqlens=torch.tensor([0, 8]))
    with pytest.raises(ValueError, match="not both"):
        model(ids, cu_seqlens=torch.tensor([0, 4]), attention_mask=torch.ones(1, 4))
