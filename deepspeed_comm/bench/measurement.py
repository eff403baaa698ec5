"""Measures all backends at each size, interleaved; the slowest rank counts, results are checked."""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_comm._timing import sample, seconds_per_call
from deepspeed_comm.bench.case import Case
from deepspeed_comm.bench.collectives import DIRECT, bandwidths
from deepspeed_comm.bench.flags import DTYPES, Options
from deepspeed_comm.bench.ledger import Ledger
from deepspeed_comm.bench.plan import Setting

# The number of consecutive samples of one backend before the next backend's turn.
TURN = 10
COPY_BYTES = 64 << 20


@dataclasses.dataclass
class Row:
    """One backend's result. loop: "tight" or "touch". wrong: wrong elements, None if unchecked."""

    collective: str
    size_bytes: int
    count: int
    type: str
    redop: str
    root: int
    time_p50_us: float
    time_p99_us: float
    algbw_gb_s: float
    busbw_gb_s: float
    wrong: int | None
    backend: str
    loop: str

    @property
    def call(self) -> tuple[str | int, ...]:
        """The measured call, without the backend."""
        return (self.collective, self.size_bytes, self.type, self.redop, self.root)


def compared(rows: Iterable[Row], first: str) -> list[tuple[Row, float]]:
    """The rows of other backends than `first`, each with its time divided by that of `first` for
    the same call. Rows without such a time are left out."""
    rows = list(rows)
    times = {row.call: row.time_p50_us for row in rows if row.backend == first}
    return [
        (row, row.time_p50_us / times[row.call])
        for row in rows
        if row.backend != first and row.call in times
    ]


@dataclasses.dataclass
class Refusal:
    """A call that a backend does not support, with its error message."""

    collective: str
    type: str
    redop: str
    backend: str
    reason: str


def groups_of(backends: list[str]) -> dict[str, Any]:
    """A group of all ranks for each backend; the default group for its own backend."""
    world: Any = dist.group.WORLD
    carried_by = dist.get_backend()
    return {
        name: world if name == carried_by else dist.new_group(backend=name) for name in backends
    }


class Measurement:
    """Measures settings. Collective over the default group, whose barrier starts each turn."""

    def __init__(self, options: Options, groups: dict[str, Any], ledger: Ledger) -> None:
        self.options, self.groups, self.ledger = options, groups, ledger

    def rows(self, setting: Setting) -> Iterator[list[Row | Refusal]]:
        """Yields one list for each size, on rank 0; empty lists on other ranks. The first list
        begins with the refusals."""
        sizes = setting.sizes(self.options, self.ledger.world)
        names = list(self.groups)
        if self.options.direct and setting.collective in DIRECT:
            names.append("dscomm-direct")
        refused: list[Row | Refusal] = []
        for name in list(names):
            reason = self._refusal(name, setting, sizes[0][1]) if sizes else None
            if reason is not None:
                names.remove(name)
                kind = (setting.collective, setting.type, setting.redop)
                refused.append(Refusal(*kind, name, reason))
        found = refused if self.ledger.rank == 0 else []
        for size, count in sizes:
            if names:
                cases = {name: self.case(name, setting, count) for name in names}
                found = found + self._measure(cases, setting, size)
            yield found
            found = []

    def case(self, name: str, setting: Setting, count: int) -> Case:
        """The case of a backend, or of "dscomm-direct"."""
        direct = name == "dscomm-direct"
        group = self.groups["dscomm" if direct else name]
        dtype = DTYPES[setting.dtype]
        return Case(setting.collective, count, dtype, setting.op, setting.root, group, direct)

    def _refusal(self, name: str, setting: Setting, count: int) -> str | None:
        """Why no rank can make this call, or None. Raises RuntimeError if just some cannot."""
        mine = None
        try:
            self.case(name, setting, count).call()
        except (RuntimeError, ValueError, TypeError) as error:
            # A broken connection or a dead rank is not a refusal.
            if type(error).__name__ in ("DistBackendError", "DistNetworkError", "DistStoreError"):
                raise
            lines = str(error).splitlines() or [""]
            mine = f"{type(error).__name__}: {lines[0]}"
        everyones = self.ledger.gather(mine) or []
        failed = [rank for rank, each in enumerate(everyones) if each is not None]
        partly = failed if len(failed) < len(everyones) else []
        reason, partly = self.ledger.agree([everyones[failed[0]] if failed else None, partly])
        if partly:
            raise RuntimeError(
                f"{name}: {setting.collective} failed on ranks {partly}, but not on all: {reason}"
            )
        return None if reason is None else str(reason)

    def _measure(self, cases: dict[str, Case], setting: Setting, size: int) -> list[Row | Refusal]:
        wrong = dict.fromkeys(cases, 0)
        samples: dict[str, list[float]] = {name: [] for name in cases}
        for name, case in cases.items():
            if self.options.check:
                wrong[name] += case.wrong_in_a_call(seed=1)
            case.clear()
            for _ in range(self.options.warmup_iters):
                case.call()
        while len(samples[next(iter(cases))]) < self.options.iters:
            for name, case in cases.items():
                left = self.options.iters - len(samples[name])
                samples[name] += self._turn(case, min(TURN, left))
        for name, case in cases.items():
            if self.options.check:
                wrong[name] += case.wrong_after_clear()
                wrong[name] += case.wrong_in_a_call(seed=2)
        everyones = self.ledger.gather([samples, wrong])
        if everyones is None:
            return []
        return [
            self._row(name, setting, size, cases[name].count,
                      [rank[0][name] for rank in everyones], [rank[1][name] for rank in everyones])
            for name in cases
        ]  # fmt: skip

    def _turn(self, case: Case, samples: int) -> list[float]:
        """Takes samples of this rank: seconds per call."""
        dist.barrier()
        # An untimed call synchronizes the ranks and warms the caches for this backend.
        case.call()
        times = []
        for _ in range(samples):
            if self.options.touch:
                case.touch()
                dist.barrier()
            times.append(seconds_per_call(case.call, self.options.agg_iters))
        return times

    def _row(
        self,
        name: str,
        setting: Setting,
        size: int,
        count: int,
        samples: list[list[float]],
        wrong: list[int],
    ) -> Row:
        slowest = [max(times) for times in zip(*samples, strict=True)]
        p50, p99 = statistics.median(slowest), nearest_rank(slowest, 99)
        algbw, busbw = bandwidths(setting.collective, size, p50, self.ledger.world)
        return Row(
            setting.collective, size, count, setting.type, setting.redop, setting.root,
            1e6 * p50, 1e6 * p99, algbw, busbw, sum(wrong) if self.options.check else None, name,
            "touch" if self.options.touch else "tight",
        )  # fmt: skip


def nearest_rank(numbers: list[float], percent: int) -> float:
    """The percentile by nearest rank."""
    return sorted(numbers)[math.ceil(len(numbers) * percent / 100) - 1]


def copy_rate(ledger: Ledger) -> float:
    """The copy rate of the slowest rank in GB/s while all ranks copy COPY_BYTES; the median of
    five.

    0 on other ranks than 0.
    """
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = functools.partial(target.copy_, source)
    copy()
    times = [sample(copy) for _ in range(5)]
    everyones = ledger.gather(times)
    if everyones is None:
        return 0.0
    slowest = [max(times) for times in zip(*everyones, strict=True)]
    return COPY_BYTES / float(statistics.median(slowest)) / 1e9
