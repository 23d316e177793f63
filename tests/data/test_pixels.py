"""Images as arrays: what Pillow decodes and resizes, upright, in three channels or one."""

import io
from typing import Any

import numpy as np
import pytest
from data.drawn import drawn, encoded
from PIL import Image, ImageOps

from dtrain.data.pixels import Form, NoImage

PLAIN = Form((8, 8), 3, "stretch", 1.0, (0.0,) * 3, (1.0,) * 3, (0.08, 1.0))


def form(**given: Any) -> Form:
    return Form(**{**{name: getattr(PLAIN, name) for name in PLAIN.__dataclass_fields__}, **given})


def read(data: bytes, form: Form = PLAIN, draws: np.random.Generator | None = None) -> np.ndarray[Any, Any]:
    out = np.empty((form.channels, *form.size), np.float32)
    form.read(data, out, draws)
    return out


def bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[height, width, channels] of an array that was not normalized."""
    return (array * 255).round().astype(np.uint8).transpose(1, 2, 0)


def far(array: np.ndarray[Any, Any], there: np.ndarray[Any, Any]) -> int:
    """The largest difference, of 255."""
    return int(np.abs(bytes_of(array).astype(int) - there).max())


def saved(image: Image.Image, format: str = "PNG", **given: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **given)
    return file.getvalue()


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"])
@pytest.mark.parametrize("size", [(8, 8), (9, 7), (40, 60)])
def test_the_pixels_are_those_of_pillow_but_for_rounding(format: str, size: tuple[int, int]) -> None:
    data = encoded(1, format, width=31, height=22)
    with Image.open(io.BytesIO(data)) as image:
        there = np.asarray(image.convert("RGB").resize(size[::-1], Image.Resampling.BILINEAR))
    assert far(read(data, form(size=size)), there) <= 1


@pytest.mark.parametrize(("width", "height"), [(40, 30), (30, 40), (33, 33), (6, 90)])
def test_the_centre_is_that_of_resize_and_center_crop_of_torchvision(width: int, height: int) -> None:
    data = encoded(2, "PNG", width=width, height=height)
    short = round(8 / 0.5)  # as Resize(16) and CenterCrop(8) compute it
    sides = (short, int(short * height / width)) if width < height else (int(short * width / height), short)
    whole = drawn(2, width, height).resize(sides, Image.Resampling.BILINEAR)
    left, top = round((sides[0] - 8) / 2.0), round((sides[1] - 8) / 2.0)
    there = np.asarray(whole.crop((left, top, left + 8, top + 8)))
    assert far(read(data, form(fit="crop", centre=0.5)), there) <= 1


def test_pixels_are_normalized_as_in_torchvision() -> None:
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    data = encoded(3, "PNG")
    here = read(data, form(mean=mean, std=std))
    there = (read(data) - np.array(mean)[:, None, None]) / np.array(std)[:, None, None]
    assert np.abs(here - there).max() < 1e-6


@pytest.mark.parametrize("turn", [*range(10), 77])
def test_an_image_is_upright_as_its_camera_says(turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    data = saved(drawn(4, 20, 12), "JPEG", exif=exif)
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image).resize((8, 8), Image.Resampling.BILINEAR)
        assert far(read(data), np.asarray(upright)) <= 1


def test_other_kinds_of_pixels_become_rgb_or_grey() -> None:
    colour = drawn(5, 8, 8)
    grey, alpha = colour.convert("L"), colour.convert("RGBA")
    alpha.putalpha(100)
    for image in (grey, alpha, colour.convert("P"), colour.convert("CMYK"), colour.convert("1"), grey.convert("LA")):
        data = saved(image, "TIFF" if image.mode == "CMYK" else "PNG")
        with Image.open(io.BytesIO(data)) as read_back:
            assert np.array_equal(bytes_of(read(data)), np.asarray(read_back.convert("RGB"))), image.mode
            one = form(channels=1, mean=(0.0,), std=(1.0,))
            assert np.array_equal(bytes_of(read(data, one))[:, :, 0], np.asarray(read_back.convert("L"))), image.mode


def test_of_16_bits_the_upper_eight_are_kept() -> None:
    deep = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    there = (deep >> 8).astype(np.uint8)
    for format in ("PNG", "TIFF"):
        assert np.array_equal(bytes_of(read(saved(Image.fromarray(deep), format)))[:, :, 1], there)


def test_a_large_jpeg_is_decoded_smaller_and_looks_the_same() -> None:
    data = encoded(6, width=800, height=600)
    whole = np.asarray(Image.open(io.BytesIO(data)).resize((8, 8), Image.Resampling.BILINEAR)).astype(int)
    assert far(read(data), whole) <= 3
    draws = np.random.Generator(np.random.Philox(key=[1, 2]))
    assert read(data, draws=draws).std() > 0


def test_a_random_part_is_the_same_for_the_same_draws_and_inside_the_image() -> None:
    data = encoded(7, "PNG", width=40, height=30)
    seen = [read(data, draws=np.random.Generator(np.random.Philox(key=[1, number]))) for number in (0, 0, 1, 2, 3)]
    assert np.array_equal(seen[0], seen[1])
    assert len({each.tobytes() for each in seen}) == 4
    thin = encoded(8, "PNG", width=200, height=3)  # no part has a usual ratio
    assert read(thin, form(scale=(1.0, 1.0)), np.random.Generator(np.random.Philox(key=[1, 2]))).shape == (3, 8, 8)


def test_half_of_the_images_are_turned_left_to_right() -> None:
    data = saved(Image.fromarray(np.tile(np.arange(0, 250, 10, dtype=np.uint8), (20, 1))))
    falls = [
        read(data, form(scale=(1.0, 1.0)), np.random.Generator(np.random.Philox(key=[3, number])))[0, 0, :]
        for number in range(200)
    ]
    assert 70 < sum(row[0] > row[-1] for row in falls) < 130


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (b"no image at all", "is no image"),
        (encoded(9, width=300, height=300)[:2000], "is torn"),
        (encoded(9, "PNG", width=60, height=60)[:300], "is torn"),
        (saved(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "has pixels of 32 bits"),
    ],
)
def test_what_is_no_image_says_why(data: bytes, sentence: str) -> None:
    with pytest.raises(NoImage, match=sentence):
        read(data)


def test_the_limit_of_pillow_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(NoImage, match="more pixels than Pillow allows"):
        read(encoded(10, width=30, height=30))
