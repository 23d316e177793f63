"""A model and a dataset for dtrain."""
