"""Attention transfer of one layer at a time: a model of any size in the memory of its largest layer."""

from supra.train.layerwise.transfer import transfer_layerwise

__all__ = ["transfer_layerwise"]
