"""Draws a saved log: latency and bus bandwidth by message size, for each operation.

    dscomm plot LOG.json FIGURE.png

LOG.json is a file of save_log(). The suffix of the figure selects one of matplotlib's formats.
Lines show the median of the ranks; the areas span all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

from deepspeed_comm import _figures

PANELS = (
    ("p50_latency_ms", "median latency (ms)"),
    ("busbw_avg_gbps", "bus bandwidth (Gbit/s)"),
)


def read_records(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The rows of a log in JSON. Raises OSError, or ValueError if the file is not one."""
    try:
        with open(path, encoding="utf-8") as file:
            records = list(json.load(file)["records"])
        for quantity, _ in PANELS:
            curves(records, quantity)  # raises if a row is not of a log
        return records
    except (ValueError, KeyError, TypeError) as error:  # UnicodeDecodeError is a ValueError
        raise ValueError(
            f"{path} was not written by save_log('log.json'): {type(error).__name__}: {error}"
        ) from error


def curves(
    records: list[dict[str, Any]], quantity: str
) -> dict[str, list[tuple[int, float, float, float]]]:
    """By operation, ascending by size: (bytes, minimum, median and maximum over the ranks)."""
    values: dict[str, dict[int, list[float]]] = {}
    for record in records:
        of_operation = values.setdefault(record["operation"], {})
        of_operation.setdefault(record["msg_size_bytes"], []).append(record[quantity])
    return {
        operation: [
            (size, min(found), statistics.median(found), max(found))
            for size, found in sorted(of_sizes.items())
        ]
        for operation, of_sizes in values.items()
    }


def draw(records: list[dict[str, Any]]) -> Any:
    """Draws the matplotlib Figure. Raises ModuleNotFoundError without matplotlib."""
    try:
        figure, area, strip = _figures.make_figure(12, 5)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a figure of the log needs matplotlib: pip install matplotlib"
        ) from error
    sizes = [record["msg_size_bytes"] for record in records]
    panels = area.subplots(1, len(PANELS))
    for axes, (quantity, title) in zip(panels, PANELS, strict=True):
        _figures.set_size_axis(axes, sizes)
        for number, (operation, points) in enumerate(curves(records, quantity).items()):
            _draw_curve(axes, operation, points, f"C{number % 10}")
        axes.set(yscale="log", ylabel=title)
        axes.grid(True, alpha=0.3)
    _figures.set_legend(strip, list(panels))
    return figure


def _draw_curve(
    axes: Any, operation: str, points: list[tuple[int, float, float, float]], color: str
) -> None:
    # Logarithmic axes cannot show 0. A call without data is a horizontal line; a bandwidth of 0, as
    # of a barrier or one rank, is left out.
    for size, _, median, _ in points:
        if size == 0 and median > 0:
            axes.axhline(median, color=color, linestyle=":", label=f"{operation} (no data)")
    shown = [point for point in points if point[0] > 0 and point[1] > 0]
    if shown:
        sizes, lowest, medians, highest = zip(*shown, strict=True)
        axes.plot(sizes, medians, color=color, marker="o", markersize=3, label=operation)
        axes.fill_between(sizes, lowest, highest, color=color, alpha=0.2)


def plot_log(log: str | os.PathLike[str], figure: str | os.PathLike[str]) -> None:
    """Draws a file of save_log().

    Raises OSError, ModuleNotFoundError without matplotlib, and ValueError if the file is not a log
    or matplotlib does not know the figure's suffix.
    """
    draw(read_records(log)).savefig(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="dscomm plot", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("log", help="a JSON file of save_log()")
    parser.add_argument("figure", help="the figure to write: .png, .svg, .pdf ...")
    options = parser.parse_args(arguments)
    try:
        plot_log(options.log, options.figure)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        sys.exit(f"dscomm plot: {error}")


if __name__ == "__main__":
    main()
