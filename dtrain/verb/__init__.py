"""Verbs of the command: one file each, each with `run(words) -> exit code`."""
