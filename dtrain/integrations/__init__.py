"""Other systems: words name a folder by its `_target_`, or one verb does; the core imports none of it."""
