"""A model that is looked at: held-out loss, generated text, hooks, and `verify`."""
