"""Evaluation past the training length: losses by position and distance, recall tasks, and what a context costs."""

from .plots import write_plots
from .recall import run_recall
from .run import PROTOCOLS, run_length

__all__ = ["PROTOCOLS", "run_length", "run_recall", "write_plots"]
