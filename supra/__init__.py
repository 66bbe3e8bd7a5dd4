"""Turn pretrained Transformers into RNNs that generate in constant memory (the SUPRA method, arXiv 2405.06640)."""

__version__ = "0.1.0"
