"""One token of linear attention on the `torch` backend."""

import torch
from torch import Tensor


def linear_attention_step_torch(
    q: Tensor, k: Tensor, v: Tensor, state: Tensor, log_decay: Tensor | None = None, *, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The public operator; arguments are already validated. The state changes in place unless autograd must
    remember it."""
    (B, H, K), (G, V), S = q.shape, v.shape[-2:], state.shape[1]
    with torch.autocast(q.device.type, enabled=False):
        inputs = (q, k, v, state, log_decay)
        traced = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        new = state.clone() if traced else state
        if log_decay is not None:
            new.mul_(log_decay.to(state.dtype).exp()[..., None, None])
        outer = (B, G, S // G, K, V)
        k_, v_ = k.to(state.dtype).view(B, G, 1, K, 1), v.to(state.dtype).view(B, G, 1, 1, V)
        new.view(outer).addcmul_(k_, v_)
        rows = (q.to(state.dtype) * scale).view(B, S, H // S, K)
        o = torch.matmul(rows, new).view(B, H, V)
    return o.to(v.dtype), new
