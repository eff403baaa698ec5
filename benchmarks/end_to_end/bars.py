"""The figure of the README: dscomm beside gloo in some rows of end_to_end.json, as bars.

python benchmarks/end_to_end/bars.py benchmarks/results/end_to_end.json    draws it again
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import report
from workload import DSCOMM, GLOO, RATES

from deepspeed_comm import _figures

# (workload, metric) of each panel, and its title.
PANELS = {
    ("decode_all_reduce", "word"): "tensor-parallel decode",
    ("train_fsdp2", "step"): "FSDP2 training",
    ("objects", "gather"): "all_gather_object",
    ("objects", "barrier"): "barrier",
}


def draw(content: dict[str, Any], path: Path) -> None:
    """Writes the figure, a PNG. `content`: that of end_to_end.json, with a row for each panel.

    Raises ModuleNotFoundError if there is no matplotlib.
    """
    rows = {(row["workload"], row["metric"], row["contender"]): row for row in content["rows"]}
    machine = content["machine"]
    title = f"2 ranks on {machine['cores']} cores, {machine['processor']}, {content['date']}"
    figure, area, strip = _figures.make_figure(10, 2.6, title, labels=2)
    panels = area.subplots(1, len(PANELS))
    for axes, ((workload, metric), name) in zip(panels, PANELS.items(), strict=True):
        pair = [rows[workload, metric, contender] for contender in (GLOO, DSCOMM)]
        unit, ratio = pair[0]["unit"], pair[1]["times_gloo"]
        better = "higher" if unit in RATES else "lower"
        axes.set_title(f"{name}: {ratio:.3g} x", fontsize="medium", fontweight="bold")
        axes.set_ylabel(f"{unit} ({better} is better)", fontsize="small")
        for place, row in enumerate(pair):
            colour = _figures.colour_of(row["contender"], [])
            bar = axes.bar([place], [row["median"]], color=colour, label=row["contender"])
            axes.bar_label(bar, [report.figure(row["median"])], padding=2)
        axes.set_xticks([])
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    _figures.set_legend(strip, list(panels))
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        draw(json.loads(Path(name).read_text()), Path(name).with_suffix(".png"))
