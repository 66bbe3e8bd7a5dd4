"""Weight files as they lie on disk: their headers, and tensors read without loading the model."""
