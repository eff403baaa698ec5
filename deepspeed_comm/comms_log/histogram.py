"""A histogram of positive numbers whose memory does not grow with them: buckets as wide as their
place on a logarithmic scale, 32 to each doubling.

What it answers is of all numbers that were added. The total is exact; a percentile lies in the
bucket of the exact one, so it is off by RELATIVE_ERROR (2.2 %) at most, and so is a trimmed mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

_BUCKETS_PER_DOUBLING = 32
RELATIVE_ERROR = 2 ** (1 / _BUCKETS_PER_DOUBLING) - 1
# What is smaller or larger is counted in the outermost buckets, without that bound: for ms, less
# than a femtosecond and more than thirty years.
SMALLEST, LARGEST = 2.0**-40, 2.0**40
MOST_BUCKETS = 80 * _BUCKETS_PER_DOUBLING + 2
_NOT_POSITIVE = -40 * _BUCKETS_PER_DOUBLING - 1  # below that of SMALLEST


def _bucket_of(value: float) -> int:
    if not value > 0:
        return _NOT_POSITIVE
    return math.floor(math.log2(min(max(value, SMALLEST), LARGEST)) * _BUCKETS_PER_DOUBLING)


class Histogram:
    """Counts floats of any unit. Not thread-safe."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        # By bucket, those alone that hold something: a call's times fill few.
        self._counts: dict[int, int] = {}
        # Sums keep the means right: of equal numbers, and of one, every answer is exact.
        self._sums: dict[int, float] = {}

    def add(self, value: float) -> None:
        bucket = _bucket_of(value)
        self.count += 1
        self.total += value
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self._sums[bucket] = self._sums.get(bucket, 0.0) + value

    def bucket_count(self) -> int:
        """Buckets that hold something: MOST_BUCKETS at most."""
        return len(self._counts)

    def percentile(self, percent: float) -> float:
        """The least number that `percent` of all are not above (the nearest rank); 0 of none."""
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
        """The mean without round(count * share) numbers at either end; 0 of none."""
        cut = round(self.count * share)
        first, last = cut, self.count - cut  # the ranks that stay
        seen, kept = 0, 0.0
        for count, mean in self._ascending():
            kept += mean * max(0, min(seen + count, last) - max(seen, first))
            seen += count
        return kept / (last - first) if last > first else 0.0

    def _ascending(self) -> Iterator[tuple[int, float]]:
        """(count, mean) of each bucket."""
        for bucket in sorted(self._counts):
            count = self._counts[bucket]
            yield count, self._sums[bucket] / count
