"""Pages of a run."""
