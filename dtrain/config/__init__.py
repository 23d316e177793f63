"""The words of the command line: their schema, grammar, files and constraints."""
