"""Encoded images as arrays. Pillow decodes, because it reads every usual format and is bound to no version of torch
(torchvision's decoder takes 0.34 ms where Pillow takes 0.5, for 320x240 pixels); torch resizes, to within one of
Pillow's 255 levels in less than half the time.
"""

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from dtrain.errors import first_line

ORIENTATION = 0x0112
"""The EXIF tag that says how a camera was held; from 5 on, width and height change places."""
ORIENTATIONS = range(1, 9)
"""Other values mean nothing."""
RATIOS = (3 / 4, 4 / 3)
"""Width by height of a random crop."""
TRIES = 10
SPARE = 2
"""A JPEG is decoded at a half, a quarter or an eighth where that leaves this many times the sides that are needed, as
for Pillow's thumbnails.
"""
Box = tuple[int, int, int, int]
"""left, top, right, bottom"""


class NoImage(ValueError):
    """The bytes are no image that can be used; says why."""


@dataclass(frozen=True)
class Form:
    """How an image becomes an array [channels, *size] of fp32, (x / 255 - mean) / std. `fit` crop: the shorter side
    becomes that of `size` divided by `centre`, and the centre is cut out; stretch: both sides become those of `size`.
    """

    size: tuple[int, int]
    """[height, width]"""
    channels: int
    fit: str
    centre: float
    mean: Sequence[float]
    std: Sequence[float]
    scale: Sequence[float]
    """Smallest and largest part of the area that a random crop has."""

    def read(self, data: bytes, out: NDArray[np.float32], draws: np.random.Generator | None) -> None:
        """Decode an image into `out`; `draws`: cut out a random part and turn it left to right by chance. Raises
        NoImage.
        """
        pixels = self._pixels(data, draws)
        if draws is not None and draws.random() < 0.5:
            pixels = pixels[:, ::-1]
        for channel in range(self.channels):
            np.multiply(np.ascontiguousarray(pixels[:, :, channel]), self._scales[channel], out=out[channel])
            out[channel] -= self._offsets[channel]

    @property
    def _scales(self) -> list[np.float32]:
        return [np.float32(1 / (255 * std)) for std in self.std]

    @property
    def _offsets(self) -> list[np.float32]:
        return [np.float32(mean / std) for mean, std in zip(self.mean, self.std, strict=True)]

    def _pixels(self, data: bytes, draws: np.random.Generator | None) -> NDArray[np.uint8]:
        """[height, width, channels]"""
        from PIL import Image, UnidentifiedImageError

        _quiet()
        try:
            with Image.open(io.BytesIO(data)) as image:
                orientation = image.getexif().get(ORIENTATION, 1)
                orientation = orientation if orientation in ORIENTATIONS else 1
                width, height = image.size[::-1] if orientation >= 5 else image.size
                box = self._crop(width, height, draws) if draws is not None else (0, 0, width, height)
                sides = self._sides(box) if draws is None else self.size
                _draft(image, (box[2] - box[0]) / sides[1], (box[3] - box[1]) / sides[0])
                pixels = _upright(_array(image, self.channels), orientation)
        except NoImage:
            raise
        except Image.DecompressionBombError as error:
            raise NoImage(f"{first_line(error).rstrip('.')}: more pixels than Pillow allows") from None
        except UnidentifiedImageError:
            raise NoImage("is no image") from None
        except (OSError, ValueError, SyntaxError, EOFError) as error:  # what Pillow raises for bytes that are wrong
            raise NoImage(f"is torn ({first_line(error).rstrip('.')})") from None
        left, top, right, bottom = _on(box, pixels, width, height)
        return _centre(_resized(pixels[top:bottom, left:right], sides), self.size)

    def _sides(self, box: Box) -> tuple[int, int]:
        """Height and width of the whole image before the centre is cut out."""
        if self.fit == "stretch":
            return self.size
        width, height = box[2], box[3]
        need = [round(side / self.centre) for side in self.size]
        if height / need[0] <= width / need[1]:  # as torchvision's Resize: the longer side is rounded down
            return need[0], max(self.size[1], need[0] * width // height)
        return max(self.size[0], need[1] * height // width), need[1]

    def _crop(self, width: int, height: int, draws: np.random.Generator) -> Box:
        """A random part, as RandomResizedCrop of torchvision draws it."""
        for _ in range(TRIES):
            area = width * height * (self.scale[0] + (self.scale[1] - self.scale[0]) * draws.random())
            low, high = map(math.log, RATIOS)
            ratio = math.exp(low + (high - low) * draws.random())
            wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < tall <= height:
                left, top = int(draws.random() * (width - wide + 1)), int(draws.random() * (height - tall + 1))
                return left, top, left + wide, top + tall
        wide, tall = min(width, round(height * RATIOS[1])), min(height, round(width / RATIOS[0]))
        left, top = (width - wide) // 2, (height - tall) // 2
        return left, top, left + wide, top + tall


@cache
def _quiet() -> None:
    """Keep Pillow's warning of a large image from the user: one that is too large is refused."""
    from PIL import Image

    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


def _draft(image: Any, across: float, down: float) -> None:
    """Have a JPEG decoded smaller, if it is many times larger than needed."""
    shrink = min(across, down) / SPARE
    if shrink >= 2 and image.format == "JPEG":
        image.draft(None, (math.ceil(image.width / shrink), math.ceil(image.height / shrink)))


def _array(image: Any, channels: int) -> NDArray[np.uint8]:
    """[height, width, channels]; transparency is dropped, grey is repeated, and of 16 bits the upper eight are kept."""
    if image.mode.startswith("I;16"):
        grey = (np.asarray(image) >> 8).astype(np.uint8)[:, :, None]
        return np.repeat(grey, channels, 2)
    if image.mode in ("I", "F"):
        raise NoImage(f"has pixels of 32 bits (mode {image.mode}), whose range is not known. Save it with 8 or 16")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    array = np.array(image.convert("RGB" if channels == 3 else "L"))
    return array if channels == 3 else array[:, :, None]


def _upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Upright, by the EXIF orientation."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return pixels[:, ::-1] if orientation in (2, 3, 6, 7) else pixels


def _on(box: Box, pixels: NDArray[np.uint8], width: int, height: int) -> Box:
    """The box on an image that was decoded smaller."""
    tall, wide = pixels.shape[:2]
    if (wide, tall) == (width, height):
        return box
    left, right = round(box[0] * wide / width), round(box[2] * wide / width)
    top, bottom = round(box[1] * tall / height), round(box[3] * tall / height)
    return left, top, max(right, left + 1), max(bottom, top + 1)


def _resized(pixels: NDArray[np.uint8], sides: tuple[int, int]) -> NDArray[np.uint8]:
    """Bilinear, with the filter as wide as the image shrinks."""
    if pixels.shape[:2] == sides:
        return pixels
    tensor = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1)[None]
    resized = F.interpolate(tensor, sides, mode="bilinear", antialias=True)
    return resized[0].permute(1, 2, 0).numpy()


def _centre(pixels: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8]:
    top, left = (round((have - want) / 2) for have, want in zip(pixels.shape[:2], size, strict=True))
    return pixels[top : top + size[0], left : left + size[1]]
