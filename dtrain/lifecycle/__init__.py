"""How a run begins to end: signals, the request to stop, hangs, stacks, the root cause of a failure."""
