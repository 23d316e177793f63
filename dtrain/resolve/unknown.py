"""Placeholder of an invalid value: using it raises Undecided, so that no rule has to check for it."""

from typing import Any, NoReturn


class Undecided(Exception):
    """A rule needs a value that is not known, because an earlier rule failed or the word is invalid."""


class Unknown:
    """Raises Undecided in any operation."""

    def _undecided(self, *_: Any, **__: Any) -> NoReturn:
        raise Undecided

    __getattr__ = __getitem__ = __iter__ = __len__ = __contains__ = __call__ = _undecided
    __str__ = __repr__ = __format__ = __bool__ = __int__ = __float__ = __index__ = __hash__ = _undecided
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _undecided
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __neg__ = _undecided
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = _undecided


UNKNOWN: Any = Unknown()
