"""Attention transfer of one layer at a time: a model of any size in the memory of its largest layer."""

from supra.train.layerwise.transfer import LayerwiseTransfer, transfer_layerwise

__all__ = ["LayerwiseTransfer", "transfer_layerwise"]
