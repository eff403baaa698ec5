"""Shared by all figures: a colour for each product, size axes, one legend for all panels."""

from __future__ import annotations

from typing import Any

# One colour for each product in every figure. Only dscomm is blue.
COLOURS = {
    "dscomm": "#1f4fa3",
    "dscomm torch": "#00a3c4",
    "dscomm-direct": "#4f83d6",
    "dscomm direct": "#4f83d6",
    "dscomm pool": "#8fb4ea",
    "gloo": "#e07b00",
    "Open MPI": "#2a8c3a",
    "MPICH": "#8a5a2b",
    "Intel MPI": "#7fb800",
    "oneCCL": "#b02a5b",
    "DeepSpeed": "#7a3fb3",
    "vLLM": "#c9a400",
    "mpi": "#2a8c3a",
    "nccl": "#5b6b00",
}
_OTHERS = ("#666666", "#9c6b6b", "#3f7f7f", "#a05fa0", "#a0a0a0")
OURS = "dscomm"  # labels with this word have thicker lines

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def colour_of(product: str, others: list[str]) -> str:
    """The product's colour; for an unknown product, one chosen by its position in `others`."""
    if product in COLOURS:
        return COLOURS[product]
    unknown = [name for name in others if name not in COLOURS]
    return _OTHERS[unknown.index(product) % len(_OTHERS)]


def width_of(product: str) -> float:
    return 2.2 if OURS in product else 1.2


def size_text(size: int) -> str:
    """Formats bytes: 8 B, 1.5 KiB, 1 MiB."""
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:g} {name}"
    return f"{size} B"


def set_size_axis(axes: Any, sizes: list[int]) -> None:
    """A logarithmic axis with at most nine ticks, at powers of two."""
    shown = sorted({size for size in sizes if size > 0})
    axes.set(xlabel="size")
    axes.set_xscale("log", base=2)
    if not shown:
        return
    first, last = (shown[0] - 1).bit_length(), shown[-1].bit_length() - 1
    step = max(1, -(-(last - first) // 8))
    ticks = [1 << power for power in range(first, last + 1, step)] or [shown[0]]
    axes.set_xticks(ticks, [size_text(tick) for tick in ticks], fontsize="small", rotation=30)


_LEGEND_COLUMNS = 6


def make_figure(
    width: float, height: float, title: str = "", labels: int = 12
) -> tuple[Any, Any, Any]:
    """Returns the matplotlib Figure, its area for panels, and the strip below for the legend.

    width, height: inches, of the area for panels. labels: the number of labels in the legend.

    Raises ModuleNotFoundError without matplotlib.
    """
    from matplotlib.figure import Figure  # not pyplot, which may need a display

    strip = 0.2 + 0.2 * max(2, -(-labels // _LEGEND_COLUMNS))
    figure = Figure(figsize=(width, height + strip), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[height, strip])
    above, below = parts
    if title:
        above.suptitle(title, fontsize="medium")
    return figure, above, below


def set_legend(strip: Any, panels: list[Any]) -> None:
    """Draws one legend for all panels, with each label once."""
    labels: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            labels.setdefault(label, handle)
    if labels:
        strip.legend(
            list(labels.values()),
            list(labels),
            loc="center",
            ncol=min(_LEGEND_COLUMNS, len(labels)),
        )
