"""One function per axis, and the order in which they wrap a model."""
