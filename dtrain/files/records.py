"""Images and their classes, by index: those of folders and tables, and those of tar shards; what is known of them
before a run.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dtrain.config.constraints import is_number
from dtrain.errors import PreflightError, WordsError, nearest
from dtrain.files import imageindex, imagerows, tarindex
from dtrain.files.rowindex import Indices
from dtrain.storage import caching

MISSING = "data=images and data=webdataset need the pillow package. Type: pip install 'dtrain[images]'"
NAMED = 3
"""Names that a sentence lists."""


class Records(Protocol):
    """Images by index. It can be sent to another process."""

    @property
    def classes(self) -> Sequence[str] | int:
        """The names of the classes, or their number where labels are numbers."""
        ...

    @property
    def notes(self) -> list[str]:
        """Sentences about what is there beside the images."""
        ...

    @property
    def digest(self) -> str:
        """Of names, sizes and classes."""
        ...

    def __len__(self) -> int: ...

    @property
    def blocks(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The images and the bytes of each block that is read at once; None if images are read alone."""
        ...

    def labels(self, index: Indices) -> Indices:
        """The class of each."""
        ...

    def read(self, index: Indices) -> list[bytes]:
        """The bytes of each. Raises PreflightError, with the name of a file that is gone or has changed."""
        ...

    def name(self, number: int) -> str:
        """The file of an image, for a person."""
        ...


def opened(format: str, path: str | Sequence[str], cache: Path, *, image: str, label: str | None) -> Records:
    """The images of `data.path`; `label` None: without their classes, of folders and tables. Raises PreflightError, and
    WordsError for an argument that does not fit them.
    """
    if format == "webdataset":
        assert label is not None
        return tarindex.opened(path, cache, image=image, label=label)
    rows = imagerows.opened(path, cache, image=image, label=label)
    return rows if rows is not None else imageindex.opened(path, cache, image=image, label=label)


def number_of(classes: Sequence[str] | int) -> int:
    return classes if isinstance(classes, int) else len(classes)


def same_classes(mine: Sequence[str] | int, others: Sequence[str] | int, key: str = "data.holdout_path") -> list[int]:
    """For each class of the images at `key` its number among those that are trained on. Raises PreflightError."""
    if isinstance(mine, int) != isinstance(others, int):
        raise PreflightError(f"{key}: its classes are names and those of training numbers, or the reverse.")
    names = [*map(str, range(mine))] if isinstance(mine, int) else list(mine)
    held = [*map(str, range(others))] if isinstance(others, int) else list(others)
    unknown = [name for name in held if name not in names]
    if unknown:
        raise PreflightError(
            f"{key} has {len(unknown)} class(es) that training lacks: {', '.join(unknown[:NAMED])}."
            f"{nearest(unknown[0], names)}"
        )
    place = {name: number for number, name in enumerate(names)}
    return [place[name] for name in held]


def fingerprint(images: Records) -> str:
    """Of all images, however they are decoded."""
    return f"images-{len(images)}-{images.digest[:32]}"


def problem(part: Mapping[str, Any], format: str, *, trained: str | None) -> str:
    """The problem with the images of a part of data; empty if there is none. `trained`: the fingerprint of those that a
    run has a position in.
    """
    if importlib.util.find_spec("PIL") is None:
        return MISSING
    if text := _unfit(part["normalize"], 3 if part["colors"] == "rgb" else 1):
        return text
    cache, given = caching.folder(part.get("cache")), {"image": part["image"], "label": part["label"]}
    try:
        images = opened(format, part["path"], cache, **given)
        if (trained or "").startswith("images-") and not str(trained).startswith(fingerprint(images)):
            return (
                f"data.path={part['path']}: images were added, removed or changed since this run began, and its "
                "checkpoints count them as they were. Put them back, or type out=<another place>, or init=<this run> "
                "to take its weights alone."
            )
        if part["holdout_path"] is not None:
            same_classes(images.classes, opened(format, part["holdout_path"], cache, **given).classes)
    except (PreflightError, WordsError) as error:
        return str(error)
    return ""


def _unfit(normalize: Any, channels: int) -> str:
    """The problem with means and deviations of the user's own; empty if there is none."""
    if isinstance(normalize, str):
        return ""
    each = [normalize.get(name) for name in ("mean", "std")]
    if (
        {*normalize} == {"mean", "std"}
        and all(isinstance(one, list) and len(one) == channels and all(map(is_number, one)) for one in each)
        and min(normalize["std"]) > 0
    ):
        return ""
    return (
        f"data.normalize: mean and std need {channels} number(s) each, and those of std are above 0. Type "
        f"'data.normalize={{mean: {[0.5] * channels}, std: {[0.5] * channels}}}'."
    )
