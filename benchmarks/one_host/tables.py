"""The tables: each peer at each size, the fastest one, and how far dscomm is from the bound."""

from __future__ import annotations

import dataclasses
import statistics

from rich.console import Console
from rich.table import Table

from benchmarks.one_host import bound
from benchmarks.one_host.peers import BEFORE
from benchmarks.one_host.rows import Pair, Row

OURS = ("dscomm", "dscomm pool", "dscomm torch", "dscomm direct")


@dataclasses.dataclass(frozen=True)
class Line:
    """One size. medians: us by peer. Fields that need a missing peer or bound are None."""

    size: int
    medians: dict[str, float]
    best: str | None  # the fastest that is not ours
    ratio: float | None  # its time divided by dscomm's: above 1 dscomm is faster
    bound_us: float | None
    of_bound: float | None  # dscomm's time divided by the bound


def lines_of(rows: list[Row], op: str, dtype: str, mode: str, state: str, ranks: int) -> list[Line]:
    """In the order of sizes."""
    chosen = [
        row for row in rows
        if (row.op, row.dtype, row.mode, row.state, row.ranks) == (op, dtype, mode, state, ranks)
    ]  # fmt: skip
    found = []
    for size in sorted({row.size for row in chosen}):
        medians = {row.peer: row.median_us for row in chosen if row.size == size}
        others = {peer: time for peer, time in medians.items() if is_other(peer)}
        best = min(others, key=others.__getitem__) if others else None
        dscomm = medians.get("dscomm")
        limit = bound.bound_us(op, size, state, ranks)
        found.append(
            Line(
                size,
                medians,
                best,
                others[best] / dscomm if best and dscomm else None,
                limit,
                dscomm / limit if dscomm and limit else None,
            )
        )
    return found


def is_other(peer: str) -> bool:
    return peer.removeprefix(BEFORE) not in OURS


def title(op: str, dtype: str, ranks: int) -> str:
    return f"{op}, {dtype}, {ranks} ranks"


def mean_ratio(lines: list[Line]) -> float | None:
    """The geometric mean of the ratios, over the sizes that have one."""
    ratios = [line.ratio for line in lines if line.ratio is not None]
    return statistics.geometric_mean(ratios) if ratios else None


def show(console: Console, lines: list[Line], heading: str) -> None:
    peers = list(dict.fromkeys(peer for line in lines for peer in line.medians))
    peers.sort(key=lambda peer: OURS.index(peer) if peer in OURS else len(OURS))
    table = Table(title=f"{heading}, median in us", title_justify="left")
    table.add_column("size", justify="right")
    has_bound = any(line.bound_us is not None for line in lines)
    of_bound = ["bound", "dscomm/bound"] if has_bound else []
    for column in [*peers, "best", "best/dscomm", *of_bound]:
        table.add_column(column, justify="right", no_wrap=True)
    for line in lines:
        times = (_time(line.medians.get(peer)) for peer in peers)
        limits = (_time(line.bound_us), _ratio(line.of_bound)) if has_bound else ()
        table.add_row(size_text(line.size), *times, line.best or "-", _ratio(line.ratio), *limits)
    table.add_section()
    blank = [""] * len(peers)
    table.add_row("mean", *blank, "geometric", _ratio(mean_ratio(lines)), *[""] * len(of_bound))
    console.print(table)


def show_pairs(console: Console, pairs: list[Pair]) -> None:
    """The geometric mean of now/before for each way to call dscomm, and the rows that are slower
    beyond their scatter."""
    for peer in dict.fromkeys(pair.now.peer for pair in pairs):
        ratios = [pair.ratio for pair in pairs if pair.now.peer == peer]
        mean = statistics.geometric_mean(ratios)
        console.print(f"{peer}: now/before {mean:.3f}, geometric mean of {len(ratios)} rows")
    slower = [pair for pair in pairs if pair.is_slower]
    console.print(f"slower than before in every run: {len(slower)} of {len(pairs)} rows")
    for pair in slower:
        row = pair.now
        console.print(
            f"  {row.peer}, {title(row.op, row.dtype, row.ranks)}, {size_text(row.size)}, "
            f"{row.mode}, {row.state}: {_time(pair.before.median_us)} us, now "
            f"{_time(row.median_us)} us ({pair.ratio:.2f}, {row.runs} runs)"
        )


def size_text(size: int) -> str:
    """8, 64K or 16M: powers of 1024."""
    for bits, unit in ((20, "M"), (10, "K")):
        if size >= 1 << bits and size % (1 << bits) == 0:
            return f"{size >> bits}{unit}"
    return str(size)


def _time(us: float | None) -> str:
    if us is None:
        return "-"
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"
