"""A figure of a run: for each collective, time and bus bandwidth against size, log-log."""

from __future__ import annotations

from typing import Any

from deepspeed_comm.bench.measurement import Row

PANELS = (("time_p50_us", "median time (us)"), ("busbw_gb_s", "bus bandwidth (GB/s)"))


def curves(rows: list[Row]) -> dict[str, dict[str, list[Row]]]:
    """By collective, by label, in the order of sizes. A label is the backend, and what else differs
    within the collective."""
    found: dict[str, dict[str, list[Row]]] = {}
    for name in dict.fromkeys(row.collective for row in rows):
        own = [row for row in rows if row.collective == name]
        differing = [
            key for key in ("type", "redop", "root") if len({getattr(r, key) for r in own}) > 1
        ]
        for row in sorted(own, key=lambda row: row.size_bytes):
            label = " ".join([row.backend, *(f"{key} {getattr(row, key)}" if key == "root"
                              else str(getattr(row, key)) for key in differing)])  # fmt: skip
            found.setdefault(name, {}).setdefault(label, []).append(row)
    return found


def draw(rows: list[Row]) -> Any:
    """The matplotlib Figure."""
    from matplotlib.figure import Figure  # without pyplot, which may want a screen

    collectives = curves(rows)
    figure = Figure(figsize=(12, 4.5 * max(1, len(collectives))), layout="constrained")
    panels = figure.subplots(max(1, len(collectives)), len(PANELS), squeeze=False)
    for line, (name, of_labels) in zip(panels, collectives.items(), strict=False):
        for axes, (quantity, title) in zip(line, PANELS, strict=True):
            axes.set(xscale="log", yscale="log", xlabel="size (bytes)", ylabel=title, title=name)
            axes.grid(True, alpha=0.3)
            for number, (label, own) in enumerate(of_labels.items()):
                _draw_curve(axes, own, quantity, label, f"C{number % 10}")
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize="small")
    return figure


def _draw_curve(axes: Any, rows: list[Row], quantity: str, label: str, color: str) -> None:
    # 0 has no place on a logarithmic axis: what has no size is a level, a bandwidth of 0 left out.
    points = [
        (row.size_bytes, getattr(row, quantity)) for row in rows if getattr(row, quantity) > 0
    ]
    if points and points[0][0] == 0:
        axes.axhline(points[0][1], color=color, linestyle=":", label=label)
    elif points:
        sizes, heights = zip(*points, strict=True)
        axes.plot(sizes, heights, color=color, marker="o", markersize=3, label=label)
