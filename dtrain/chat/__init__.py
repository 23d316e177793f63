"""Conversations as tokens: rows of files become messages (turns), messages text by the chat template of a tokenizer
(template), text tokens of which those of the answers count (counted), and tokens files of the cache (making, files).

Nothing here imports torch: a launch looks at its conversations before there are ranks.
"""
