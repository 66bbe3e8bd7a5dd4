"""`SupraForCausalLM`: the teacher's network with linear recurrent attention in the layers that were converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
)
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from supra_kernels import resolve_backend

from .attention import Ablation, SupraLinearAttention, SupraSoftmaxAttention
from .cache import SupraCache
from .configuration_supra import SupraConfig
from .packing import (
    Packing,
    packing_from_boundaries,
    packing_from_mask,
    places_of_rising,
    positions_from_boundaries,
)
from .precision import SupraRotaryEmbedding


class SupraDecoderLayer(LlamaDecoderLayer):
    """The teacher's block with its attention chosen by `layer_types`."""

    def __init__(self, config: SupraConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        assert config.layer_types is not None
        self.layer_type = config.layer_types[layer_idx]
        linear = self.layer_type == "linear_attention"
        attention: type[nn.Module] = SupraLinearAttention if linear else SupraSoftmaxAttention
        self.self_attn = attention(config, layer_idx)  # type: ignore[assignment]


class SupraPreTrainedModel(LlamaPreTrainedModel):
    """Loading, saving and initialisation shared by the two classes below."""

    config: SupraConfig
    config_class = SupraConfig
    _no_split_modules = ["SupraDecoderLayer"]
    _keep_in_fp32_modules_strict = {"decay", "window_mix"}
    _keys_to_ignore_on_load_unexpected = [r"rotary_emb\.inv_freq"]
    _can_compile_fullgraph = False
    _can_record_outputs = {"hidden_states": SupraDecoderLayer, "attentions": SupraSoftmaxAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if not hasattr(module, "initial_values"):
            super()._init_weights(module)
            return
        make: Callable[[torch.Generator], dict[str, Tensor]] = module.initial_values  # type: ignore[assignment]
        for name, value in make(torch.default_generator).items():
            init.copy_(getattr(module, name), value)


class SupraModel(SupraPreTrainedModel):
    """Embeddings, blocks and final norm; pads and packed documents are sorted out once for all layers."""

    def __init__(self, config: SupraConfig) -> None:
        super().__init__(config)
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(SupraDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = SupraRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: SupraCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """input_ids [B, T] -> last hidden state [B, T, hidden].

        `attention_mask` [B, past + T] is 0 at pads, wherever they stand. `cu_seqlens` [N+1] bounds documents packed
        over the B·T tokens in row order: state, window and positions start anew in each. `position_ids` [B or 1, T]
        turn RoPE alone and may skip: window, sinks, decay and masks count tokens. Where they fall without `cu_seqlens`,
        a softmax layer begins a document, as in transformers, and the state of a linear one does not.

        Raises:
            ValueError: both or neither of `input_ids` and `inputs_embeds`, packed documents together with a cache or
                a mask, a cache of another kind, or a mask that is not 2-D where a linear layer needs one.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = SupraCache(self.config)
        if cache is not None and not isinstance(cache, SupraCache):
            raise ValueError(
                f"cache is a {type(cache).__name__}; a converted model needs a SupraCache(model.config)"
            )
        if cu_seqlens is not None:
            if cache is not None and cache.get_seq_length():
                raise ValueError("packed documents (cu_seqlens) cannot continue from a cache")
            if attention_mask is not None:
                raise ValueError("give cu_seqlens or attention_mask, not both")
            cache = None
        batch_size, num_columns = inputs_embeds.shape[:2]
        if position_ids is None:
            position_ids = self._positions(inputs_embeds, attention_mask, cache, cu_seqlens)
        packing = self._packing(attention_mask, cu_seqlens, batch_size, num_columns)
        places = self._places(position_ids, cu_seqlens, batch_size)
        masks = self._softmax_masks(inputs_embeds, attention_mask, cache, places)
        position_embeddings = self.rotary_emb(inputs_embeds, position_ids=position_ids)
        hidden_states = inputs_embeds
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask=masks.get(str(layer.layer_type)),
                position_embeddings=position_embeddings,
                position_ids=places,  # by which flash attention would find documents
                cache=cache,
                use_cache=use_cache,
                packing=packing,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)

    def _positions(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        cache: SupraCache | None,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        """Positions [B or 1, T], in each document from 0.

        A feature map after RoPE sees absolute positions, so a model with linear layers does not count pads; one
        without them counts columns as its teacher does.
        """
        batch_size, num_columns = inputs_embeds.shape[:2]
        if cu_seqlens is not None:
            return positions_from_boundaries(cu_seqlens, batch_size, num_columns)
        seen = cache.get_seq_length() if cache is not None else 0
        if self.config.num_linear_layers and attention_mask is not None and attention_mask.ndim == 2:
            return (attention_mask.cumsum(1)[:, attention_mask.shape[1] - num_columns :] - 1).clamp(min=0)
        return (torch.arange(num_columns, device=inputs_embeds.device) + seen).unsqueeze(0)

    def _places(self, position_ids: Tensor, cu_seqlens: Tensor | None, batch_size: int) -> Tensor | None:
        """Each token's place [B or 1, T] in its document, for the softmax layers; None where there are none.

        transformers takes positions that do not rise by one for the start of a document, so it never sees those that
        skip.
        """
        if self.config.num_linear_layers == self.config.num_hidden_layers:
            return None
        if cu_seqlens is not None:
            return positions_from_boundaries(cu_seqlens, batch_size, position_ids.shape[1])
        return places_of_rising(position_ids)

    def _packing(
        self, attention_mask: Tensor | None, cu_seqlens: Tensor | None, batch_size: int, num_columns: int
    ) -> Packing | None:
        """Where the linear layers' real tokens are, or None where all columns are real and each row is one sequence."""
        if not self.config.num_linear_layers:
            return None
        if cu_seqlens is not None:
            return packing_from_boundaries(cu_seqlens, batch_size, num_columns, self.config.window)
        if attention_mask is None:
            return None
        if attention_mask.ndim != 2:
            raise ValueError(
                f"attention_mask has {attention_mask.ndim} dimensions; a linear layer has no score matrix to mask "
                "and takes only a 2-D padding mask [batch, tokens]"
            )
        local = attention_mask[:, attention_mask.shape[1] - num_columns :]
        return None if bool((local != 0).all()) else packing_from_mask(local, self.config.window)

    def _softmax_masks(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        cache: SupraCache | None,
        places: Tensor | None,
    ) -> dict[str, Tensor | None]:
        """The causal masks of the kept softmax layers, by layer type."""
        makers = {
            "full_attention": create_causal_mask,
            "sliding_attention": create_sliding_window_causal_mask,
        }
        present = set(self.config.layer_types or [])
        return {
            layer_type: make(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                cache=cache,
                position_ids=places,
            )
            for layer_type, make in makers.items()
            if layer_type in present
        }


class SupraForCausalLM(SupraPreTrainedModel, LlamaForCausalLM):
    """The converted language model; `generate()` runs in constant memory where every layer is linear."""

    def __init__(self, config: SupraConfig) -> None:
        SupraPreTrainedModel.__init__(self, config)
        self.model = SupraModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        # A state cannot be rolled back: generate() then refuses assisted decoding and prompt lookup by name.
        self._is_stateful = config.num_linear_layers > 0
        self.post_init()

    def linear_layers(self) -> list[SupraLinearAttention]:
        """The converted attention layers, in order."""
        return [module for module in self.modules() if isinstance(module, SupraLinearAttention)]

    def set_backend(self, backend: str, device: torch.device | str | None = None) -> str:
        """Choose the kernel backend of every linear layer and return the name of the one that will run.

        `device`: where the model will be, if it is not there yet.

        Raises:
            supra_kernels.BackendError: the backend is unknown, or cannot run here or with heads so wide; nothing falls
                back.
        """
        layers = self.linear_layers()
        head_dims = (self.config.feature_dim, self.config.value_dim) if layers else (0, 0)
        resolved = resolve_backend(backend, device or self.device, head_dims)
        for layer in layers:
            layer.backend = resolved
        return resolved

    @contextmanager
    def ablation(self, branch: Ablation | None) -> Iterator[None]:
        """Run with only the softmax window (`window_only`) or only the linear part over all tokens (`linear_only`).

        Raises:
            ValueError: the model has no window to take away or to keep.
        """
        layers = self.linear_layers()
        if branch is not None and not self.config.window:
            raise ValueError(f"ablation {branch!r} needs a model with a window; this one has none")
        for layer in layers:
            layer.ablation = branch
        try:
            yield
        finally:
            for layer in layers:
                layer.ablation = None

    def _prepare_cache_for_generation(  # type: ignore[override]  # the rest of its arguments is of no use here
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"cache_implementation={generation_config.cache_implementation!r} does not fit a recurrent state; "
                "leave it out and the model makes its own cache"
            )
        if model_kwargs.get("cache") is None and generation_config.use_cache is not False:
            model_kwargs["cache"] = SupraCache(self.config)


__all__ = ["SupraForCausalLM", "SupraModel", "SupraPreTrainedModel"]
