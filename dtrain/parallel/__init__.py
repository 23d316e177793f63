"""A file for each axis, and the order in which they wrap a model."""
