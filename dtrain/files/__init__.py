"""Rows, images and tokens in files, on any storage: found by their place, read in parts."""
