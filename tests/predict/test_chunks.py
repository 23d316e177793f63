"""Tokens of a chunk of the loss, by the numbers of a plan."""

import pytest

from dtrain.predict.chunks import HEADROOM, rows_for

ROOMY = 1e12


def rows(tokens: int, width: int, vocabulary: int, headroom: float = ROOMY, bytes: int = 2) -> int:
    return rows_for(tokens, width=width, vocabulary=vocabulary, bytes=bytes, device="cuda", headroom=headroom)


def test_a_narrow_model_takes_more_rows_to_fill_a_gpu() -> None:
    """17.3M / 768 = 22,526 rows at a width of 768; from 2,112 on it is 8,192."""
    assert [rows(8192 * 64, width, 50304) for width in (768, 2112, 8192)] == [16384, 8192, 8192]


@pytest.mark.parametrize(
    ("tokens", "chunks"), [(32768, [16384] * 2), (65536, [16384] * 4), (8192, [8192]), (100, [100])]
)
def test_chunks_are_equal_so_one_graph_is_compiled(tokens: int, chunks: list[int]) -> None:
    assert [rows(tokens, 768, 50304)] * len(chunks) == chunks


def test_tokens_that_nothing_near_divides_leave_a_shorter_last_chunk() -> None:
    """22,531 is prime: 2 chunks, of 88.01 times 128 tokens."""
    assert rows(22531, 1024, 50304) == 89 * 128


@pytest.mark.parametrize(
    ("headroom", "expected"), [(HEADROOM, 8192), (4e9, 4096), (1e9, 1024), (1e8, 512), (-1e9, 512)]
)
def test_logits_take_half_of_the_headroom_down_to_512_tokens(headroom: float, expected: int) -> None:
    assert rows(16384, 4096, 128256, headroom) == expected


def test_wider_logits_are_fewer() -> None:
    assert rows(16384, 4096, 128256, HEADROOM, bytes=4) == 4096


def test_a_cpu_has_a_chunk_in_its_cache() -> None:
    assert rows_for(1 << 20, width=64, vocabulary=1 << 17, bytes=4, device="cpu", headroom=0) == 512
