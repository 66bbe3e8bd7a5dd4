"""Encoders for long-range tasks, built from the project's own layers, and what they are compared with."""
