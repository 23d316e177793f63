"""Words of the user's own, for verbs that only show words."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dtrain.config import files


@contextmanager
def beside(words: Sequence[str], problems: list[str]) -> Iterator[Sequence[str]]:
    """Make the words of the user's own that a run with these words can be given available inside the context, which
    gives a sentence for each that cannot be used. Mistakes in the names of their folders are added to `problems`.
    """
    if not files.may_be_beside(words):
        yield ()
        return
    from dtrain.compose import own_words  # all that reads words, and most folders bring none

    own = own_words(words, problems)
    with files.beside(own.files):
        yield own.complaints
