"""Figures of the results: time against size, log-log, peers and the bound in one picture."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.one_host import bound, tables
from benchmarks.one_host.rows import Row
from benchmarks.one_host.tables import OURS


def draw(rows: list[Row], folder: Path) -> list[Path]:
    """One file for each operation, dtype and number of ranks, a panel for each state and mode."""
    files = []
    for op, dtype, ranks in dict.fromkeys((row.op, row.dtype, row.ranks) for row in rows):
        own = [row for row in rows if (row.op, row.dtype, row.ranks) == (op, dtype, ranks)]
        kind = dtype if op == "all_reduce" else op  # messages are of one dtype
        files.append(folder / f"one_host_{kind}_{ranks}_ranks.png")
        _figure(own, tables.title(op, dtype, ranks)).savefig(files[-1], dpi=110)
    return files


def _figure(rows: list[Row], title: str) -> Figure:
    states = list(dict.fromkeys(row.state for row in rows))
    modes = list(dict.fromkeys(row.mode for row in rows))
    size = (6.5 * len(modes), 5.0 * len(states))
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(len(states), len(modes), squeeze=False)
    peers = list(dict.fromkeys(row.peer for row in rows))
    for line, state in zip(panels, states, strict=True):
        for axes, mode in zip(line, modes, strict=True):
            axes.set(xscale="log", yscale="log", title=f"{state}, {mode}")
            axes.set(xlabel="size (bytes)", ylabel="median time (us)")
            axes.grid(True, alpha=0.3)
            own = [row for row in rows if (row.state, row.mode) == (state, mode)]
            for number, peer in enumerate(peers):
                points = sorted((row.size, row.median_us) for row in own if row.peer == peer)
                if points:
                    style = {"linewidth": 2.2} if peer in OURS else {"linewidth": 1.0}
                    color = f"C{number % 10}"
                    axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=3,
                              label=peer, **style)  # fmt: skip
            sizes = sorted({row.size for row in own})
            limits = [bound.bound_us(rows[0].op, each, state, rows[0].ranks) for each in sizes]
            if sizes and None not in limits:
                axes.plot(sizes, limits, color="black", linestyle="--", label="bound")
            if sizes:
                axes.legend(fontsize="small")
    return figure
