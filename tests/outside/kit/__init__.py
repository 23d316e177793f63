"""A package of parts that dtrain does not know: one of each kind, with the facts that it states."""
