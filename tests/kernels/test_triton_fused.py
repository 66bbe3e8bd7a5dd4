"""Feature maps, RoPE and GroupNorm inside the kernels against the same things one after the other, in fp64 PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from supra_kernels import BackendError, reference
from supra_kernels.triton_backend.chunked import Front, Norm, linear_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAPS = ("identity", "relu", "elu", "hedgehog")


def map_features(x: Tensor, kind: str, bias: Tensor | None) -> Tensor:
    if kind == "relu":
        return F.relu(x if bias is None else x + bias)
    if kind == "elu":
        return F.elu(x) + 1
    return torch.softmax(torch.cat((x, -x), -1), -1) if kind == "hedgehog" else x


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, heads, K], D features at a time as cos and sin [B or 1, T, D]."""
    pieces = x.unflatten(-1, (-1, cos.shape[-1]))
    low, high = pieces.chunk(2, -1)
    turned = torch.cat((-high, low), -1)
    return (pieces * cos[:, :, None, None] + turned * sin[:, :, None, None]).flatten(-2)


class Case:
    """Random inputs of one fused call, and the two ways to compute it."""

    def __init__(
        self,
        kind: str,
        rope: bool,
        norm: str,
        *,
        B: int = 1,
        H: int = 2,
        G: int = 1,
        D: int = 16,
        T: int = 19,
    ):
        generator = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        K = 2 * D if kind == "hedgehog" else D
        self.kind, self.norm, self.B, self.T = kind, norm, B, T
        self.tensors = {"q": normal(B, T, H, D), "k": normal(B, T, G, D) / 2, "v": normal(B, T, G, D)}
        self.tensors |= {"log_decay": -normal(B, T, G).abs() / 4, "state": normal(B, G, K, D)}
        if kind == "relu":
            self.tensors |= {"q_bias": normal(H, K), "k_bias": normal(G, K)}
        if norm == "affine":
            self.tensors |= {"weight": normal(H * D), "bias": normal(H * D)}
        angles = normal(1, T, D // 2).repeat(1, 1, 2)
        self.cos, self.sin = (angles.cos(), angles.sin()) if rope else (None, None)
        self.do, self.d_final = normal(B, T, H, D), normal(B, G, K, D)

    def run(self, compute: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
        """Outputs and the gradient of every tensor."""
        x = {name: value.to(dtype).requires_grad_() for name, value in self.tensors.items()}
        o, final = compute(x, *(None if a is None else a.to(dtype) for a in (self.cos, self.sin)))
        loss = (o * self.do.to(dtype)).sum() + (final * self.d_final.to(dtype)).sum()
        gradients = torch.autograd.grad(loss, list(x.values()))
        return {"o": o.detach(), "final": final.detach()} | {
            f"d {name}": gradient for name, gradient in zip(x, gradients, strict=True)
        }

    def apart(self, x: dict[str, Tensor], cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k = (
            map_features(x["q"], self.kind, x.get("q_bias")),
            map_features(x["k"], self.kind, x.get("k_bias")),
        )
        if cos is not None and sin is not None:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        o, final = reference.linear_attention_parallel(
            q, k, x["v"], x["log_decay"], scale=0.3, initial_state=x["state"], output_final_state=True
        )
        assert final is not None
        if self.norm != "none":
            rows = o.flatten(0, 1).flatten(1)
            o = F.group_norm(rows, o.shape[2], x.get("weight"), x.get("bias"), 1e-5).view(o.shape)
        return o, final

    def fused(self, x: dict[str, Tensor], cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor]:
        x = {name: value.to(DEVICE) for name, value in x.items()}
        front = Front(
            self.kind, x.get("q_bias"), x.get("k_bias"),  # type: ignore[arg-type]
            None if cos is None else cos.to(DEVICE), None if sin is None else sin.to(DEVICE),
        )  # fmt: skip
        o, final = linear_attention(
            x["q"], x["k"], x["v"], x["log_decay"], scale=0.3, initial_state=x["state"], output_final_state=True,
            chunk_size=16, front=front, norm=None if self.norm == "none" else Norm(x.get("weight"), x.get("bias")),
        )  # fmt: skip
        assert final is not None
        return o.cpu(), final.cpu()


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize(
    ("rope", "norm"), [(True, "affine"), (False, "none")], ids=["rope and norm", "map alone"]
)
def test_fused_equals_one_after_the_other(
    kind: str, rope: bool, norm: str, near: Callable[..., None]
) -> None:
    case = Case(kind, rope, norm)
    near(case.run(case.fused, torch.float32), case.run(case.apart, torch.float64), 1e-5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("relu", {"D": 80, "T": 9}),  # pieces of K and V with masks, rotated within 80
        ("hedgehog", {"D": 48, "T": 9}),  # features of two rotations, an odd number of tiles
        ("identity", {"B": 2, "H": 4, "G": 2, "T": 17}),
    ],
)
def test_head_dims_batches_and_groups(kind: str, options: dict[str, Any], near: Callable[..., None]) -> None:
    case = Case(kind, True, "plain", **options)
    near(case.run(case.fused, torch.float32), case.run(case.apart, torch.float64), 1e-5)


def test_large_pre_activations_do_not_overflow(near: Callable[..., None]) -> None:
    for kind in ("elu", "hedgehog"):
        case = Case(kind, False, "none", T=3)
        case.tensors["q"] = case.tensors["q"] * 60
        found = case.run(case.fused, torch.float32)
        assert all(value.isfinite().all() for value in found.values())
        near({"o": found["o"]}, {"o": case.run(case.apart, torch.float64)["o"]}, 1e-5)


def test_no_tokens() -> None:
    case = Case("relu", True, "affine", T=0)
    found = case.run(case.fused, torch.float32)
    assert found["o"].shape == (1, 0, 2, 16) and torch.equal(found["final"], case.tensors["state"].float())
    assert all(not found[f"d {name}"].any() for name in ("q_bias", "k_bias", "weight", "bias"))


def test_a_norm_too_wide_for_one_piece_is_refused() -> None:
    x = torch.zeros(1, 2, 1, 144)
    with pytest.raises(BackendError, match="head dim 144: backend 'triton' normalises at most 128 columns"):
        linear_attention(x, x, x, norm=Norm())


def test_a_norm_keeps_unnormalised_sums_that_leave_the_range_of_fp16() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (60 * torch.rand(1, 24, 1, 16, generator=generator) for _ in range(2))
    v, d_y = (torch.randn(1, 24, 1, 16, generator=generator) for _ in range(2))
    inputs = [x.half() for x in (q, k, v)]

    exact = [x.double().requires_grad_() for x in inputs]
    o, _ = reference.linear_attention_parallel(exact[0], exact[1], exact[2])
    assert o.abs().max() > 65504
    y = F.group_norm(o.flatten(0, 1).flatten(1), 1, eps=1e-5).view(o.shape)
    wanted = [y, *torch.autograd.grad((y * d_y).sum(), exact)]

    ours = [x.to(DEVICE).requires_grad_() for x in inputs]
    y, _ = linear_attention(ours[0], ours[1], ours[2], norm=Norm())
    found = [y, *torch.autograd.grad((y.float() * d_y.to(DEVICE)).sum(), ours)]
    for got, want in zip(found, wanted, strict=True):
        assert (got.cpu().double() - want).abs().max() <= 1e-2 * want.abs().max()


def test_rows_that_do_not_exist_leave_no_nan_without_an_epsilon() -> None:
    x = torch.randn(1, 5, 1, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weight = torch.ones(16, device=DEVICE, requires_grad=True)
    y, _ = linear_attention(x, x, x, norm=Norm(weight, torch.zeros(16, device=DEVICE), eps=0.0))
    (gradient,) = torch.autograd.grad(y.sum(), weight)
    assert gradient.isfinite().all()


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda x: Front("gelu"), "feature_map 'gelu' is unknown"),  # type: ignore[arg-type]
        (lambda x: Front(cos=x), "cos and sin go together"),
        (lambda x: Norm(weight=x), "weight and bias go together"),
    ],
)
def test_mistakes_in_what_is_fused_are_named(make: Callable[[Tensor], Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        make(torch.zeros(3))


def test_angles_that_do_not_divide_the_features_are_refused() -> None:
    x, angles = torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 12)
    with pytest.raises(ValueError, match="cos is 12 wide; expected a divisor of the 16 features"):
        linear_attention(x, x, x, front=Front(cos=angles, sin=angles))
