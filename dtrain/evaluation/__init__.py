"""Evaluation of a model: held-out loss, generated text, hooks, and `verify`."""
