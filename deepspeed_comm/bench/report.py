"""The output of rank 0: a table like nccl-tests' during the run, and the files at its end."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import deepspeed_comm
from deepspeed_comm._machine import describe_place, processor_name
from deepspeed_comm.bench.flags import Options
from deepspeed_comm.bench.measurement import Refusal, Row, compared
from deepspeed_comm.comms_log.files import write_csv, write_json

COLUMNS = [field.name for field in dataclasses.fields(Row)]
# nccl-tests' columns of calls in place, with two percentiles instead of one time, and the backend.
HEADINGS = (
    ("size", "count", "type", "redop", "root", "time p50", "time p99", "algbw", "busbw", "#wrong"),
    ("(B)", "(elements)", "", "", "", "(us)", "(us)", "(GB/s)", "(GB/s)", ""),
)
_WIDTHS = (12, 12, 9, 6, 6, 11, 11, 9, 9, 8)
_BACKEND_WIDTH = 13


def heading(first: str = "") -> str:
    """The table's heading. first: the backend to compare with; "" with a single backend."""
    ends = (f"  {'backend':<{_BACKEND_WIDTH}}" + (f"  vs {first}" if first else ""), "")
    lines = zip(HEADINGS, ends, strict=True)
    return "\n".join(f"#{_cells(cells)[1:]}{end}".rstrip() for cells, end in lines)


def _cells(texts: tuple[str, ...]) -> str:
    return "".join(f" {text:>{width}}" for text, width in zip(texts, _WIDTHS, strict=True))


def line_of(found: Row | Refusal, ratio: float | None = None) -> str:
    """One line of the table. ratio: the time relative to the first backend's."""
    if isinstance(found, Refusal):
        what = f"{found.collective} here (type {found.type}, redop {found.redop})"
        return f"# {found.backend} cannot run {what}: {found.reason}"
    wrong = "N/A" if found.wrong is None else str(found.wrong)
    cells = (
        *(str(found.size_bytes), str(found.count), found.type, found.redop, str(found.root)),
        *(f"{found.time_p50_us:.2f}", f"{found.time_p99_us:.2f}"),
        *(f"{found.algbw_gb_s:.3f}", f"{found.busbw_gb_s:.3f}", wrong),
    )
    versus = "" if ratio is None else f"{ratio:.2f} x"
    return f"{_cells(cells)}  {found.backend:<{_BACKEND_WIDTH}}  {versus}".rstrip()


def footer(rows: list[Row], first: str) -> list[str]:
    """nccl-tests' last line for each backend, and the times relative to the first backend."""
    backends = sorted({row.backend: None for row in rows}, key=lambda name: name != first)
    lines = []
    for backend in backends:
        moved = [row.busbw_gb_s for row in rows if row.backend == backend and row.size_bytes > 0]
        if moved:
            lines.append(f"# Avg bus bandwidth    : {statistics.fmean(moved):.4f}  {backend}")
    ratios: dict[tuple[str, str], list[float]] = {}
    for row, ratio in compared(rows, first):
        ratios.setdefault((row.backend, row.collective), []).append(ratio)
    for (backend, name), own in ratios.items():
        lines.append(
            f"# {name}: {backend} takes {statistics.geometric_mean(own):.2f} x the time of {first} "
            f"(geometric mean of {len(own)}, {min(own):.2f} to {max(own):.2f})"
        )
    return lines


def introduction(options: Options, world: int) -> str:
    call = "after each rank rewrote its tensors" if options.touch else "in a tight loop"
    turns = ", interleaved" if len(options.backends) + options.direct > 1 else ""
    return (
        f"# {world} rank{'s' * (world != 1)}, torch {torch.__version__}, {processor_name()}\n"
        f"# rank 0 on {describe_place()}\n"
        f"# {options.iters} samples of {options.agg_iters} call{'s' * (options.agg_iters != 1)}"
        f"{turns}, {call}; "
        "times of the slowest rank"
    )


Tell = Callable[[str], None]


@contextlib.contextmanager
def progress(rank: int, steps: int) -> Iterator[tuple[Callable[[], None], Tell]]:
    """Yields (call after each step, print a line); both do nothing on other ranks than 0. Shows a
    bar on a terminal."""
    if rank != 0:
        yield (lambda: None), (lambda line: None)
        return
    bar: Any = None
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):  # the bar is optional
            from rich.progress import Progress

            # Drawn between measurements only, because a thread would disturb them.
            bar = Progress(transient=True, auto_refresh=False)
    if bar is None:
        yield (lambda: None), (lambda line: print(line, flush=True))
        return
    with bar:
        task = bar.add_task("measuring", total=steps)
        yield (
            (lambda: bar.update(task, advance=1, refresh=True)),
            lambda line: bar.console.print(line, highlight=False, markup=False, soft_wrap=True),
        )


def why_not_writable(options: Options) -> str | None:
    """Why rank 0 could not write the files, or None; checked before the measurement."""
    for path in (options.json, options.csv, options.plot):
        if path is not None and (not path.absolute().parent.is_dir() or path.is_dir()):
            return f"{path}: its folder must exist, and it must not be a folder"
    if options.plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError as error:
            return f"--plot needs matplotlib: pip install matplotlib ({error})"
        if options.plot.suffix != ".png":
            return f"--plot: expected a name that ends in .png, got {options.plot}"
    return None


def write_files(
    options: Options, world: int, found: list[Row | Refusal], copies: tuple[float, float]
) -> None:
    """Writes the files of the flags. copies: the copy rates before and after, in GB/s.

    Raises OSError if a file cannot be written.
    """
    rows = [each for each in found if isinstance(each, Row)]
    if options.json is not None:
        content = {
            "deepspeed_comm": deepspeed_comm.__version__,
            "torch": str(torch.__version__),
            "host": platform.node(),
            "processor": processor_name(),
            "timestamp": datetime.datetime.now().astimezone().isoformat(),
            "world_size": world,
            "options": dataclasses.asdict(options),
            "copy_gb_s": {"before": copies[0], "after": copies[1]},
            "rows": [dataclasses.asdict(each) for each in rows],
            "refused": [dataclasses.asdict(each) for each in found if isinstance(each, Refusal)],
        }
        write_json(options.json, content, default=str)
    if options.csv is not None:
        write_csv(options.csv, COLUMNS, (dataclasses.asdict(row) for row in rows))
    if options.plot is not None:
        from deepspeed_comm.bench.plot import draw

        ranks = f"{world} rank{'s' * (world != 1)}"
        title = f"{ranks}, {processor_name()}, {datetime.date.today()}"
        draw(rows, options.backends[0], title).savefig(options.plot)
