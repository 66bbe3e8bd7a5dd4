"""The converted model: configuration, cache, layers, and its registration with transformers' Auto classes."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .cache import RecurrentLayer, SupraCache
from .configuration_supra import SupraConfig, kv_cache_bytes, recurrent_state_bytes
from .initialise import init_new_tensors, is_new_parameter
from .modeling_supra import SupraForCausalLM, SupraModel

__all__ = [
    "RecurrentLayer",
    "SupraCache",
    "SupraConfig",
    "SupraForCausalLM",
    "SupraModel",
    "init_new_tensors",
    "is_new_parameter",
    "kv_cache_bytes",
    "recurrent_state_bytes",
]

AutoConfig.register("supra", SupraConfig)
AutoModel.register(SupraConfig, SupraModel)
AutoModelForCausalLM.register(SupraConfig, SupraForCausalLM)
