"""`supra report`: the results of several evaluation runs on one HTML page and one Markdown page."""

from .read import read_any, run_folders
from .write import PagePaths, write_page

__all__ = ["PagePaths", "read_any", "run_folders", "write_page"]
