"""Training data. A Source is addressable by index; a Stream walks it in the global order, and its state is one
integer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from dtrain.data.order import Indices

Loading = Literal["thread", "block", "step"]
Batch = dict[str, Any]
"""`inputs` and `targets`, each a tensor [B, ...] (inputs may be a mapping of tensors for models with several). Where
targets were padded also `target_mask` [B, T], bool: which of them a sample has; the others are -100, or NaN of floats.
"""
IGNORE = -100
"""Classes and tokens with this value do not count as targets."""


class Source(Protocol):
    """Samples by index. Every `data` choice builds a Source."""

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts that a model may need: vocab, inputs (shape of one), outputs."""
        ...

    @property
    def dense(self) -> bool:
        """Whether every target counts in the loss, so that the count of a batch follows from its shape."""
        ...

    @property
    def loading(self) -> Loading:
        """Where `take` runs. `thread`: in the background, many steps at once; it must use numpy alone, because a second
        thread that computes with torch halves the speed of the first (two OpenMP pools share the cores) and shares its
        random state. `block`: in the training thread, many steps at once. `step`: there, one step at a time.
        """
        ...

    @property
    def fingerprint(self) -> str:
        """A digest of the samples; a run does not resume with other data."""
        ...

    def __len__(self) -> int: ...

    def take(self, index: Indices, epoch: Indices) -> Batch:
        """A batch, on the CPU. `epoch` is for everything that differs from pass to pass, such as augmentation."""
        ...

    def holdout(self) -> "Source | None":
        """The samples held out for evaluation; None if there are none."""
        ...


@runtime_checkable
class Ordered(Protocol):
    """A source with an order of its own, which must depend on nothing else than what `fingerprint` tells."""

    def order(self, positions: Indices, *, seed: int) -> tuple[Indices, Indices]:
        """(sample, epoch) of each position of a run."""
        ...


@runtime_checkable
class Growing(Protocol):
    """A source that can be what it was before samples were added to it."""

    def as_of(self, fingerprint: str) -> list[str] | None:
        """Become, with what is held out, the source with that fingerprint, if samples were only added since: a sentence
        for each place where they were; None if it is another.
        """
        ...


@runtime_checkable
class Whole(Protocol):
    """A source that evaluation reads in another way than training does."""

    def whole(self) -> Source:
        """All its samples as evaluation reads them: nothing is drawn for them, and no window is shifted. It may be this
        object, changed.
        """
        ...


@runtime_checkable
class Noted(Protocol):
    """A source that has something to say when a run begins."""

    @property
    def notes(self) -> list[str]: ...


@runtime_checkable
class Classed(Protocol):
    """A source whose classes may have names."""

    @property
    def class_names(self) -> list[str] | None: ...

    def as_classes(self, names: Sequence[str]) -> None:
        """Number the classes as those with these names, of training. Raises WordsError for a class that is none of
        them, PreflightError for numbers in place of names.
        """
        ...


@runtime_checkable
class Padding(Protocol):
    """A source that may pad rows, and knows where it did."""

    def with_mask(self, name: str) -> None:
        """Give the model an attention_mask from now on, if rows are padded; an input that has no name gets this one."""
        ...


@runtime_checkable
class Typed(Protocol):
    """A source that can give the types that another one has."""

    def fractions(self) -> frozenset[str]:
        """The inputs that are fractions, by name with a dot before each key; empty: the one that has no name."""
        ...

    def with_fractions(self, names: frozenset[str]) -> None:
        """Make fractions of whole numbers in these inputs from now on."""
        ...


@runtime_checkable
class Asking(Protocol):
    """A source whose samples are read by other processes, of several batches at a time."""

    def ask(self, index: Indices, epoch: Indices) -> Callable[[], Batch] | None:
        """Begin to read a batch, which the answer waits for; it may be called in another thread. None if `take` must
        read it.
        """
        ...


class TextSource(Source, Protocol):
    """A source of text as tokens."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


@runtime_checkable
class Chatting(Protocol):
    """A source of conversations."""

    def prompts(self, messages: Sequence[Any]) -> tuple[list[list[int]], set[int]]:
        """The tokens of conversations to be answered, and the tokens that end an answer. Raises PreflightError."""
        ...


def whole(source: Source) -> Source:
    """All samples of a source, as evaluation reads them."""
    return source.whole() if isinstance(source, Whole) else source


def context_of(source: Source) -> int:
    """The most tokens of a sample; of a source that does not say, as many as its first sample has."""
    stated = getattr(source, "sequence", None)
    return int(stated or source.take(np.array([0]), np.array([0]))["inputs"].shape[1])


__all__ = [
    "IGNORE", "Asking", "Batch", "Chatting", "Classed", "Growing", "Indices", "Loading", "Noted", "Ordered", "Padding",
    "Source", "Tensor", "TextSource", "Typed", "Whole", "context_of", "whole",
]  # fmt: skip
