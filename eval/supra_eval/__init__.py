"""Evaluation of a converted model beside its teacher and its own ablations."""
