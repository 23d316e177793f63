"""The end of a run: signals, the request to stop, hangs, stacks, the root cause of a failure."""
