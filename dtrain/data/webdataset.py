"""Images and classes in tar shards, as webdataset writes them.

data=webdataset "data.path='s3://bucket/{000..099}.tar'" data.label=cls data.workers=4
"""

from collections.abc import Sequence
from typing import Any

from dtrain.data import pictures


def build(
    *, path: str | Sequence[str], holdout_path: str | Sequence[str] | None, holdout: float, image: str, label: str,
    size: int | Sequence[int], colors: str, fit: str, centre: float, augment: str, scale: Sequence[float],
    normalize: Any, seed: int, workers: int, cache: str | None,
) -> pictures.Pictures:  # fmt: skip
    """A Source of all images. Raises PreflightError for a shard that is torn or packed, and for a sample without a
    class.
    """
    return pictures.build(
        "webdataset", path=path, holdout_path=holdout_path, holdout=holdout, image=image, label=label, size=size,
        colors=colors, fit=fit, centre=centre, augment=augment, scale=scale, normalize=normalize, seed=seed,
        workers=workers, cache=cache,
    )  # fmt: skip
