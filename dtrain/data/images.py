"""Images in class folders, or named by the rows of a table.

data=images data.path=flowers data.size=224 data.workers=4
"""

from collections.abc import Sequence
from typing import Any

from dtrain.data import pictures


def build(
    *, path: str, holdout_path: str | None, holdout: float, image: str, label: str | None, size: int | Sequence[int],
    colors: str, fit: str, centre: float, augment: str, scale: Sequence[float], normalize: Any, seed: int,
    workers: int, cache: str | None,
) -> pictures.Pictures:  # fmt: skip
    """A Source of all images. Raises PreflightError for a folder that has no classes, and for a file that is no
    image.
    """
    return pictures.build(
        "images", path=path, holdout_path=holdout_path, holdout=holdout, image=image, label=label, size=size,
        colors=colors, fit=fit, centre=centre, augment=augment, scale=scale, normalize=normalize, seed=seed,
        workers=workers, cache=cache,
    )  # fmt: skip
