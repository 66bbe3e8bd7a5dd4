"""Long-range classification, Long Range Arena and small tasks of its kind: data, models, training and scores."""
