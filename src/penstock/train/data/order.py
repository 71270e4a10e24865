"""A shuffled order of any length that is computed instead of stored.

    k ──┬── left ──────(+)──► right'        a Feistel network permutes the numbers below a power of four;
        └── right ─ mix ┘──► left'          one that falls outside is sent through again until it is inside

The k-th sequence of an epoch follows from the seed, the epoch and k. So the state of a run's
data is one number, the count of sequences seen, and the order is the same on every machine.
"""

from __future__ import annotations

MIXING_ROUNDS = 6
MASK_64_BITS = (1 << 64) - 1


def shuffled(position: int, length: int, seed: int) -> int:
    """Return which of `length` sequences comes at a position.

    Positions past the end belong to further epochs, each with its own order.

    >>> sorted(shuffled(k, 5, seed=1) for k in range(5))
    [0, 1, 2, 3, 4]
    >>> [shuffled(k, 5, seed=1) for k in range(5)] == [shuffled(k, 5, seed=1) for k in range(5, 10)]
    False
    """
    epoch, index = divmod(position, length)
    half = max((length - 1).bit_length() + 1, 2) // 2
    key = _mix(_mix(seed) ^ epoch)
    while True:
        index = _permute(index, half, key)
        if index < length:
            return index


def _permute(index: int, half: int, key: int) -> int:
    low = (1 << half) - 1
    left, right = index >> half, index & low
    for turn in range(MIXING_ROUNDS):
        left, right = right, left ^ (_mix(key ^ (turn << 56) ^ right) & low)
    return left << half | right


def _mix(number: int) -> int:
    """Mix 64 bits (the finisher of splitmix64)."""
    number = (number + 0x9E3779B97F4A7C15) & MASK_64_BITS
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & MASK_64_BITS
    number = (number ^ number >> 27) * 0x94D049BB133111EB & MASK_64_BITS
    return number ^ number >> 31
