"""Figures of the results: time against size, log-log, peers and the bound in one picture.

python -m benchmarks.one_host.plot benchmarks/results/one_host.json    draws them again
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.one_host import bound, tables
from benchmarks.one_host.rows import Row
from benchmarks.one_host.tables import OURS
from deepspeed_comm import _figures


def draw(rows: list[Row], folder: Path, about: str) -> list[Path]:
    """One file for each operation, dtype and number of ranks, a panel for each state and mode in
    which dscomm and others were seen. `about`: the processor and the day, for the titles."""
    files = []
    for op, dtype, ranks in dict.fromkeys((row.op, row.dtype, row.ranks) for row in rows):
        own = [row for row in rows if (row.op, row.dtype, row.ranks) == (op, dtype, ranks)]
        kind = dtype if op == "all_reduce" else op  # messages are of one dtype
        title = f"{tables.title(op, dtype, ranks)}; {about}"
        files.append(folder / f"one_host_{kind}_{ranks}_ranks.png")
        _figure(own, title).savefig(files[-1], dpi=110)
    return files


def _figure(rows: list[Row], title: str) -> Any:
    # A panel without dscomm, or with dscomm alone, compares nothing.
    pairs = {(row.state, row.mode) for row in rows}
    of_pair = {pair: {row.peer for row in rows if (row.state, row.mode) == pair} for pair in pairs}
    seen = {pair for pair, own in of_pair.items() if own & {*OURS} and own - {*OURS}} or pairs
    states = [state for state in dict.fromkeys(row.state for row in rows)
              if any(state == each for each, _ in seen)]  # fmt: skip
    modes = list(dict.fromkeys(row.mode for row in rows))
    figure, area, strip = _figures.make_figure(6.5 * len(modes), 4.5 * len(states), title)
    panels = area.subplots(len(states), len(modes), squeeze=False)
    peers = list(dict.fromkeys(row.peer for row in rows))
    for line, state in zip(panels, states, strict=True):
        for axes, mode in zip(line, modes, strict=True):
            axes.set_visible((state, mode) in seen)
            own = [row for row in rows if (row.state, row.mode) == (state, mode)]
            _figures.set_size_axis(axes, [row.size for row in own])
            axes.set(yscale="log", title=f"{state}, {mode}", ylabel="median time (us)")
            axes.grid(True, alpha=0.3)
            for peer in peers:
                points = sorted((row.size, row.median_us) for row in own if row.peer == peer)
                if points:
                    axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=peer,
                              color=_figures.colour_of(peer, peers),
                              linewidth=_figures.width_of(peer))  # fmt: skip
            sizes = sorted({row.size for row in own})
            limits = [bound.bound_us(rows[0].op, each, state, rows[0].ranks) for each in sizes]
            if sizes and None not in limits:
                axes.plot(sizes, limits, color="black", linestyle="--", label="bound")
    _figures.set_legend(strip, list(panels.ravel()))
    return figure


def about(results: dict[str, Any]) -> str:
    """The processor and the day of a file of results."""
    return f"{results['processor']}, {results['timestamp'].partition('T')[0]}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        content = json.loads(Path(name).read_text())
        drawn = draw([Row(**row) for row in content["rows"]], Path(name).parent, about(content))
        print("\n".join(map(str, drawn)))
