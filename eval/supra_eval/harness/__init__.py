"""lm-eval's tasks: the model class `supra`, shared prefixes read once, local data, and runs over a comparison."""
