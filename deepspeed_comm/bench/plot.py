"""Draws a run: for each collective, the time by size. A second panel has the times relative to the
first backend's or, for a single backend, the bus bandwidth."""

from __future__ import annotations

from typing import Any

from deepspeed_comm import _figures
from deepspeed_comm.bench.measurement import Row, compared

_PAIRS_IN_A_LINE = 2


def curves(rows: list[Row]) -> dict[str, dict[str, list[Row]]]:
    """The rows by collective and label, ascending by size. A label is the backend, plus the dtype,
    the operator or the root if these differ within the collective."""
    found: dict[str, dict[str, list[Row]]] = {}
    for name in dict.fromkeys(row.collective for row in rows):
        own = [row for row in rows if row.collective == name]
        differing = [
            key for key in ("type", "redop", "root") if len({getattr(r, key) for r in own}) > 1
        ]
        for row in sorted(own, key=lambda row: row.size_bytes):
            label = " ".join([row.backend, *_cells(row, differing)])
            found.setdefault(name, {}).setdefault(label, []).append(row)
    return found


def _cells(row: Row, keys: list[str]) -> list[str]:
    return [f"root {row.root}" if key == "root" else str(getattr(row, key)) for key in keys]


def draw(rows: list[Row], first: str, title: str = "") -> Any:
    """Draws the matplotlib Figure. first: the backend that the others are compared with."""
    collectives = curves(rows)
    backends = list(dict.fromkeys(row.backend for row in rows))
    pairs = min(_PAIRS_IN_A_LINE, max(1, len(collectives)))
    lines = max(1, -(-len(collectives) // pairs))
    looks = _looks(collectives, backends)
    figure, area, strip = _figures.make_figure(10 * pairs, 3.6 * lines, title, len(looks))
    panels = area.subplots(lines, 2 * pairs, squeeze=False).ravel()
    for number, (name, of_labels) in enumerate(collectives.items()):
        times, beside = panels[2 * number], panels[2 * number + 1]
        sizes = [row.size_bytes for own in of_labels.values() for row in own]
        for axes in (times, beside):
            _figures.set_size_axis(axes, sizes)
            axes.grid(True, alpha=0.3)
        times.set(yscale="log", title=name, ylabel="median time (us)")
        for label, own in of_labels.items():
            _draw_curve(times, [(row.size_bytes, row.time_p50_us) for row in own], label, looks)
        if len(backends) > 1:
            beside.set(title=f"{name}: time relative to {first}", ylabel="ratio")
            beside.axhline(1.0, color="black", linewidth=0.8)
            ratios = {id(row): ratio for row, ratio in compared(sum(of_labels.values(), []), first)}
            for label, own in of_labels.items():
                points = [(row.size_bytes, ratios[id(row)]) for row in own if id(row) in ratios]
                _draw_curve(beside, points, label, looks)
        else:
            beside.set(yscale="log", title=f"{name}: bus bandwidth", ylabel="GB/s")
            for label, own in of_labels.items():
                points = [(row.size_bytes, row.busbw_gb_s) for row in own]
                _draw_curve(beside, points, label, looks)
    for axes in panels[2 * len(collectives) :]:
        axes.set_visible(False)
    _figures.set_legend(strip, list(panels))
    return figure


def _looks(
    collectives: dict[str, dict[str, list[Row]]], backends: list[str]
) -> dict[str, dict[str, Any]]:
    """Line properties by label, the same in all panels. Each backend has a colour, and its labels
    have different line styles. With a single backend, its labels have different colours."""
    styles = ("-", "--", ":", "-.")
    backend_of = {
        label: own[0].backend
        for of_labels in collectives.values()
        for label, own in of_labels.items()
    }
    number_of: dict[str, int] = {}
    looks = {}
    for label, backend in backend_of.items():
        number = number_of[backend] = number_of.get(backend, -1) + 1
        colour = _figures.colour_of(backend, backends)
        if len(backends) == 1 and len(backend_of) > 1:
            colour, number = f"C{number % 10}", number // 10
        looks[label] = {
            "color": colour,
            "linewidth": _figures.width_of(backend),
            "linestyle": styles[number % len(styles)],
        }
    return looks


def _draw_curve(
    axes: Any, points: list[tuple[int, float]], label: str, looks: dict[str, dict[str, Any]]
) -> None:
    # Logarithmic axes cannot show 0: leaves out a bandwidth of 0; a call without data is a line.
    points = [(size, height) for size, height in points if height > 0]
    if points and points[0][0] == 0:
        axes.axhline(points[0][1], label=label, **{**looks[label], "linestyle": ":"})
    elif points:
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label, **looks[label])
