"""Runs and sweeps, read from their files, and the pages that show them."""
