"""Data of long-range tasks: generators, the folders that they write, and readers of what others released."""
