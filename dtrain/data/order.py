"""The global order of samples: a counter-based permutation, whose only state is the position p.

epoch = p // n, and inside an epoch sample = permutation(p % n; seed, epoch): a Feistel network over the smallest number
of bits that holds n (halves of unequal width when it is odd), cycle-walked until the value is below n: at most twice on
average (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). No list of indices, O(1) seek.
The order is a file format: VERSION changes when it does, and checkpoints carry it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

VERSION = 1
ROUNDS = 6
Indices = NDArray[np.int64]


def samples(positions: Indices, *, n: int, seed: int) -> tuple[Indices, Indices]:
    """(sample, epoch) of each position in the global order; both int64, shaped like `positions`.

    The order of a run with `seed` and `batch`, whose step counts from 0:

        source = dtrain.data.dataset.Dataset(mine, holdout=0.1)  # the arguments of the run's `data`
        index, epoch = samples(np.arange(step * batch, (step + 1) * batch), n=len(source), seed=derive(seed, "data"))
        source.original(index)  # indices of these samples in `mine`
    """
    epochs = positions // n
    order = np.empty_like(positions)
    for epoch in set(epochs.ravel().tolist()):
        here = epochs == epoch
        order[here] = permute(positions[here] % n, n=n, key=_mix64(_mix64(seed) ^ epoch))
    return order, epochs


def permute(values: Indices, *, n: int, key: int) -> Indices:
    """A bijection of 0 .. n-1 chosen by `key` (64 bits), applied to `values`."""
    if n == 1:
        return np.zeros_like(values)
    bits = (n - 1).bit_length()
    keys = [np.uint64(_mix64(key + round) & 0xFFFFFFFF) for round in range(ROUNDS)]
    out = _feistel(values.astype(np.uint64), bits, keys)
    walking = out >= n
    while walking.any():
        out[walking] = _feistel(out[walking], bits, keys)
        walking = out >= n
    return out.astype(np.int64)


def _feistel(values: NDArray[np.uint64], bits: int, keys: list[np.uint64]) -> NDArray[np.uint64]:
    """A Feistel network: each round XORs one half with a hash of the other half and a key. A round is its own inverse,
    so the whole is a bijection.
    """
    low = bits // 2
    shift, left_mask, right_mask = np.uint64(low), np.uint64((1 << (bits - low)) - 1), np.uint64((1 << low) - 1)
    left, right = values >> shift, values & right_mask
    for round, key in enumerate(keys):
        if round % 2:
            right = right ^ (_mix32(left ^ key) & right_mask)
        else:
            left = left ^ (_mix32(right ^ key) & left_mask)
    return (left << shift) | right


def _mix32(x: Any) -> Any:
    """A 32-bit integer hash with the constants of https://github.com/skeeto/hash-prospector (lowbias32)."""
    low = np.uint64(0xFFFFFFFF)
    x = x & low
    x ^= x >> np.uint64(16)
    x = x * np.uint64(0x7FEB352D) & low
    x ^= x >> np.uint64(15)
    x = x * np.uint64(0x846CA68B) & low
    return x ^ (x >> np.uint64(16))


def _mix64(x: int) -> int:
    """splitmix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)
