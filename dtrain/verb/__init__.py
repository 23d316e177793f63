"""What the command can do: one file per verb, each with `run(words) -> exit code`."""
