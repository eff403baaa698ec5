"""Prints the times: a table for each layout and wire, and summaries of all of them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable

from benchmarks.hosts.runs import Table, wire_text

SMALL = 4096  # bytes; smaller calls have a separate summary


@dataclasses.dataclass(frozen=True)
class Cell:
    """One collective at one size: how many times as long as dscomm the others take."""

    table: Table
    collective: str
    size: int
    mpi: float  # the fastest library
    gloo: float
    fastest_mpi: str

    @property
    def ratio(self) -> float:
        return min(self.mpi, self.gloo)

    @property
    def winner(self) -> str:
        return f"mpi {self.fastest_mpi}" if self.mpi <= self.gloo else "gloo"


def cells_of(table: Table, ours: str) -> list[Cell]:
    """ours: the library over which dscomm is compared."""
    found = []
    for collective, sizes in table.medians_us.items():
        for size, times in sizes.items():
            own = times[f"dscomm {ours}"]
            libraries = {name[4:]: us for name, us in times.items() if name.startswith("mpi ")}
            best = min(libraries, key=libraries.__getitem__)
            ratios = (libraries[best] / own, times["gloo"] / own)
            found.append(Cell(table, collective, int(size), *ratios, best))
    return found


def print_table(table: Table, libraries: Iterable[str], ours: str) -> None:
    columns = [f"{who} {name}" for who in ("dscomm", "mpi") for name in libraries] + ["gloo"]
    heads = [*columns, "mpi /dscomm", "gloo /dscomm"]
    print(f"\n{table.title}: float32, us; ratios to dscomm over {ours}, mpi's fastest")
    for line, first in enumerate(("", "bytes")):
        words = (head.partition(" ")[::2][line] for head in heads)
        print(f"{'':>16} {first:>10} " + " ".join(f"{word:>9}" for word in words))
    for cell in cells_of(table, ours):
        times = table.medians_us[cell.collective][str(cell.size)]
        figures = [f"{times[column]:>9.1f}" for column in columns]
        figures += [f"{ratio:>9.2f}" for ratio in (cell.mpi, cell.gloo)]
        print(f"{cell.collective:>16} {cell.size:>10} {' '.join(figures)}", flush=True)


def print_summaries(tables: list[Table], ours: str) -> None:
    """Summaries of each collective over all layouts and wires."""
    cells = [cell for table in tables for cell in cells_of(table, ours)]
    large = [cell for cell in cells if cell.size >= SMALL]
    small = [cell for cell in cells if cell.size < SMALL]
    print(f"\nfrom {SMALL} bytes on, time of the fastest of gloo and the MPIs / dscomm's")
    _print_spread(large, {"": lambda cell: cell.ratio})
    print(f"\nbelow {SMALL} bytes, time of the fastest MPI / dscomm's, and of gloo / dscomm's")
    _print_spread(small, {"mpi": lambda cell: cell.mpi, "gloo": lambda cell: cell.gloo})
    slower = [cell for cell in large if cell.ratio < 1]
    print(f"\nfrom {SMALL} bytes on, dscomm is slower in {len(slower)} of {len(large)} cells")
    for cell in sorted(slower, key=lambda cell: cell.ratio):
        place = f"{cell.table.title:<34} {cell.collective:>16} {cell.size:>10}"
        print(f"{place} {cell.ratio:>6.2f} {cell.winner}")


def _print_spread(cells: list[Cell], ratios: dict[str, Callable[[Cell], float]]) -> None:
    heads = [(who, word) for who in ratios for word in ("worst", "median", "best")]
    for words in zip(*heads, strict=True):
        if any(words):
            print(f"{'':>16} " + " ".join(f"{word:>6}" for word in words))
    for collective in dict.fromkeys(cell.collective for cell in cells):
        figures = []
        for ratio in ratios.values():
            found = [ratio(cell) for cell in cells if cell.collective == collective]
            figures += [min(found), statistics.median(found), max(found)]
        print(f"{collective:>16} " + " ".join(f"{figure:>6.2f}" for figure in figures))


def print_overlap(wire: int, medians_s: dict[str, dict[str, float]]) -> None:
    """medians_s: by backend and call of overlap.py. The ratio is together / (compute + alone)."""
    print(f"\n2 hosts x 2, wire {wire_text(wire)}: communication beside compute, ms")
    for together, compute, alone in (
        ("all_reduce beside matmul", "matmul", "all_reduce"),
        ("step", "step without them", "buckets"),
    ):
        print(f"{'':>8} {alone:>18} {compute:>18} {together:>25}  ratio")
        for backend, calls in medians_s.items():
            parts = [calls[alone], calls[compute]]
            figures = (
                f"{1e3 * parts[0]:>18.1f} {1e3 * parts[1]:>18.1f} {1e3 * calls[together]:>25.1f}"
            )
            print(f"{backend:>8} {figures} {calls[together] / sum(parts):>6.2f}", flush=True)
