"""`dtrain run <out>` takes a place and nothing else; what it does there: tests/launcher/test_detached.py."""

import commands
import pytest


@pytest.mark.parametrize("words", [[], ["steps=3"], ["a", "b"]])
def test_words_are_refused(words: list[str]) -> None:
    done = commands.run("run", *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert "run: it takes the place of one submitted run. Type dtrain run <out>" in done.stderr
