"""A value that was asked for wrongly: no rule may build on it, and none has to ask whether it is one."""

from typing import Any, NoReturn


class Undecided(Exception):
    """A rule asked for what is not known, because a rule before it failed or the word was wrong."""


class Unknown:
    """Whatever is done with it raises Undecided."""

    def _undecided(self, *_: Any, **__: Any) -> NoReturn:
        raise Undecided

    __getattr__ = __getitem__ = __iter__ = __len__ = __contains__ = __call__ = _undecided
    __str__ = __repr__ = __format__ = __bool__ = __int__ = __float__ = __index__ = __hash__ = _undecided
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _undecided
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __rmod__ = __neg__ = _undecided
    __floordiv__ = __rfloordiv__ = __truediv__ = __rtruediv__ = _undecided


UNKNOWN: Any = Unknown()
