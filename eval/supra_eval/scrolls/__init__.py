"""SCROLLS and other questions on long documents, at several context cut-offs."""
