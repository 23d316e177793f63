"""Images and their classes as samples: bytes by index, decoded by the rank or by processes of their own. A random crop
depends on the seed, the pass and the image alone.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtrain.data import Batch, Indices, Loading, shared
from dtrain.data.order import _mix64
from dtrain.data.pixels import Form, NoImage
from dtrain.data.split import Blocks, Scattered, Split
from dtrain.data.workers import Workers
from dtrain.errors import PreflightError
from dtrain.files import records
from dtrain.files.records import Records
from dtrain.lifecycle import loaders
from dtrain.storage.caching import folder

NORMS = {"imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), "half": ((0.5,) * 3, (0.5,) * 3)}
"""Mean and standard deviation by name; grey images have the mean of the three."""


@dataclass(frozen=True)
class Decoder:
    """Reads images of `images` by index, and makes batches of them. `seed` None: nothing is drawn."""

    images: Records
    form: Form
    seed: int | None

    def batch(self, index: Indices, epoch: Indices) -> tuple[Tensor, Tensor]:
        """(images [B, channels, height, width] of fp32, classes [B]). Raises PreflightError, with the name of what is
        no image.
        """
        out = shared.empty((len(index), self.form.channels, *self.form.size), np.float32)
        for place, data in enumerate(self.images.read(index)):
            number = int(index[place])
            loaders.note(number)
            try:
                self.form.read(data, out[place], self._draws(number, int(epoch[place])))
            except NoImage as error:
                raise PreflightError(f"data.path: {self.images.name(number)} {error}.") from None
        return torch.from_numpy(out), torch.from_numpy(self.images.labels(index))

    def _draws(self, index: int, epoch: int) -> np.random.Generator | None:
        if self.seed is None:
            return None
        return np.random.Generator(np.random.Philox(key=[_mix64(_mix64(self.seed) ^ epoch), index]))


class Pictures:
    """A Source of the part `split` of images. `held`: the images that are held out, if they are others; `places`: the
    number of each of their classes among those that are trained on.
    """

    loading: Loading = "thread"
    dense = True

    def __init__(
        self, decoder: Decoder, split: Split, *, outputs: int, workers: int, held: Records | None = None,
        places: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        self._decoder, self._split, self._outputs, self._workers = decoder, split, outputs, workers
        self._held, self._places = held, places

    @property
    def classes(self) -> Sequence[str] | int:
        return self._decoder.images.classes

    @property
    def notes(self) -> list[str]:
        return [f"data.path: {note}" for note in self._decoder.images.notes]

    @property
    def class_names(self) -> list[str] | None:
        return None if isinstance(self.classes, int) else list(self.classes)

    @property
    def facts(self) -> Mapping[str, Any]:
        form = self._decoder.form
        known = {"inputs": [form.channels, *form.size], "kind": "float32", "outputs": self._outputs}
        return known | ({"class_names": self.class_names} if self.class_names else {})

    @property
    def fingerprint(self) -> str:
        form = hashlib.sha256(repr(self._decoder.form).encode()).hexdigest()[:8]
        return f"{records.fingerprint(self._decoder.images)}-{form}"

    def __len__(self) -> int:
        return len(self._split)

    def take(self, index: Indices, epoch: Indices) -> Batch:
        index = self.original(index)
        if self._workers:
            return self._processes.ask(index, epoch, self._joined)()
        return self._joined([[part.numpy() for part in self._decoder.batch(index, epoch)]])

    def ask(self, index: Indices, epoch: Indices) -> Callable[[], Batch] | None:
        """Have a batch read by the processes; None if there are none."""
        return self._processes.ask(self.original(index), epoch, self._joined) if self._workers else None

    def _joined(self, parts: Sequence[Any]) -> Batch:
        """A batch of what several processes have read, or this one."""
        inputs, targets = (np.concatenate(c) if self._workers else c[0] for c in zip(*parts, strict=True))
        if self._places is not None:
            targets = np.array(self._places)[targets]
        return {"inputs": torch.from_numpy(inputs), "targets": torch.from_numpy(targets)}

    def whole(self) -> "Pictures":
        self._decoder = replace(self._decoder, seed=None)
        return self

    def as_classes(self, names: Sequence[str]) -> None:
        """Number the classes as those with these names."""
        self._places = records.same_classes(names, self.classes, "data.path")

    def described(self, images: Indices, trained: Sequence[str]) -> dict[str, list[Any]]:
        """The file of each of these images, and its class, if the classes are those that were `trained`."""
        told: dict[str, list[Any]] = {"file": [self._decoder.images.name(number) for number in images.tolist()]}
        names = self.classes
        if names and (isinstance(names, int) or {*names} <= {*trained}):
            numbers = self._decoder.images.labels(images).tolist()
            told["target"] = numbers if isinstance(names, int) else [names[number] for number in numbers]
        return told

    def original(self, index: Indices) -> Indices:
        """Numbers of these samples among all images."""
        return self._split.original(index)

    def order(self, positions: Indices, *, seed: int) -> tuple[Indices, Indices]:
        return self._split.order(positions, seed=seed)

    def holdout(self) -> "Pictures | None":
        return self._heldout

    @cached_property
    def _heldout(self) -> "Pictures | None":
        images, split = self._decoder.images, self._split.rest()
        if self._held is not None:
            images, split = self._held, _split(self._held, 0)
        if split is None:
            return None
        decoder = Decoder(images, self._decoder.form, None)
        return Pictures(decoder, split, outputs=self._outputs, workers=self._workers, places=self._places_of(images))

    def _places_of(self, images: Records) -> list[int] | None:
        return None if self._held is None else records.same_classes(self.classes, images.classes)

    @cached_property
    def _processes(self) -> Workers:
        return Workers(self._decoder.batch, self._workers)


def build(
    format: str, *, path: Any, holdout_path: Any, holdout: float, image: str, label: str | None,
    size: int | Sequence[int], colors: str, fit: str, centre: float, augment: str, scale: Sequence[float],
    normalize: Any, seed: int, workers: int, cache: str | None,
) -> Pictures:  # fmt: skip
    """A Source of all images. Raises PreflightError, with the file, for one that is none."""
    sides = (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
    channels = 3 if colors == "rgb" else 1
    mean, std = _norm(normalize, channels)
    form = Form(size=sides, channels=channels, fit=fit, centre=centre, mean=mean, std=std, scale=tuple(scale))
    where = folder(cache)
    images = records.opened(format, path, where, image=image, label=label)
    held = None if holdout_path is None else records.opened(format, holdout_path, where, image=image, label=label)
    return Pictures(
        Decoder(images, form, None if augment == "none" else seed),
        _split(images, 0 if held else holdout), outputs=records.number_of(images.classes), workers=workers,
        held=held,
    )  # fmt: skip


def _split(images: Records, holdout: float) -> Split:
    """The images that are trained on, in blocks if they are read so."""
    if images.blocks is None:
        return Scattered.of(len(images), holdout)
    sizes, weights = images.blocks
    return Blocks(sizes, weights, holdout)


def _norm(normalize: Any, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) of each channel."""
    if normalize == "none":
        return (0.0,) * channels, (1.0,) * channels
    if isinstance(normalize, str):
        whole = NORMS[normalize]
        return whole if channels == 3 else ((sum(whole[0]) / 3,), (sum(whole[1]) / 3,))
    return tuple(map(float, normalize["mean"])), tuple(map(float, normalize["std"]))
