"""A histogram of positive numbers with bounded memory: 32 logarithmic buckets for each doubling.

The count and the total are exact. Percentiles and trimmed means have a relative error of at most
RELATIVE_ERROR (2.2 %).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

_BUCKETS_PER_DOUBLING = 32
RELATIVE_ERROR = 2 ** (1 / _BUCKETS_PER_DOUBLING) - 1
# Smaller and larger numbers go into the outermost buckets, without the bound on the error. In ms,
# that is below a femtosecond and above thirty years.
SMALLEST, LARGEST = 2.0**-40, 2.0**40
MOST_BUCKETS = 80 * _BUCKETS_PER_DOUBLING + 2
_NOT_POSITIVE = -40 * _BUCKETS_PER_DOUBLING - 1  # the bucket below SMALLEST


def _bucket_of(value: float) -> int:
    if not value > 0:
        return _NOT_POSITIVE
    return math.floor(math.log2(min(max(value, SMALLEST), LARGEST)) * _BUCKETS_PER_DOUBLING)


class Histogram:
    """Counts floats of any unit. Not thread-safe."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        # By bucket, without empty ones; the times of a call fill few buckets.
        self._counts: dict[int, int] = {}
        # Sums make the mean of each bucket exact.
        self._sums: dict[int, float] = {}

    def add(self, value: float) -> None:
        bucket = _bucket_of(value)
        self.count += 1
        self.total += value
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self._sums[bucket] = self._sums.get(bucket, 0.0) + value

    def bucket_count(self) -> int:
        """The number of buckets in use, at most MOST_BUCKETS."""
        return len(self._counts)

    def percentile(self, percent: float) -> float:
        """The percentile by nearest rank; 0 without numbers. Raises ValueError outside 0 to 100."""
        if not 0 <= percent <= 100:
            raise ValueError(f"percent: expected 0 to 100, got {percent!r}")
        rank = max(1, math.ceil(self.count * percent / 100))
        seen = 0
        for count, mean in self._ascending():
            seen += count
            if seen >= rank:
                return mean
        return 0.0

    def trimmed_mean(self, share: float) -> float:
        """The mean without round(count * share) numbers at either end; 0 without numbers."""
        cut = round(self.count * share)
        first, last = cut, self.count - cut  # the numbers that remain, by position
        seen, kept = 0, 0.0
        for count, mean in self._ascending():
            kept += mean * max(0, min(seen + count, last) - max(seen, first))
            seen += count
        return kept / (last - first) if last > first else 0.0

    def _ascending(self) -> Iterator[tuple[int, float]]:
        """(count, mean) of each bucket, ascending by the mean."""
        for bucket in sorted(self._counts):
            count = self._counts[bucket]
            yield count, self._sums[bucket] / count
