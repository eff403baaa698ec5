"""Writes the log of all ranks to a file on rank 0.

Files are replaced atomically: an existing file stays until the new one is complete.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import json
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

FORMATS = ("json", "csv")
COLUMNS = (
    "rank",
    "operation",
    "msg_size_bytes",
    "count",
    "total_latency_ms",
    "avg_latency_ms",
    "p50_latency_ms",
    "p99_latency_ms",
    "tput_avg_gbps",
    "busbw_avg_gbps",
)


@contextlib.contextmanager
def replaced_when_complete(path: str | os.PathLike[str]) -> Iterator[IO[str]]:
    """A text file that replaces `path` when the block ends; after an error, `path` is unchanged."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            yield file
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_csv(
    path: str | os.PathLike[str], columns: Sequence[str], rows: Iterable[Mapping[str, Any]]
) -> None:
    with replaced_when_complete(path) as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any], **options: Any) -> None:
    """options: of json.dump()."""
    with replaced_when_complete(path) as file:
        json.dump(content, file, indent=1, **options)
        file.write("\n")


def gather_and_write(mine: Any, write: Callable[[list[Any]], None], path: Any) -> None:
    """Calls write() on rank 0 with the objects of all ranks, in rank order.

    Collective over the default group. Raises RuntimeError on every rank if write() fails.
    """
    is_writer = dist.get_rank() == 0
    everyones: list[Any] | None = [None] * dist.get_world_size() if is_writer else None
    dist.gather_object(mine, everyones, dst=0)
    outcome: list[str | None] = [None]
    cause: Exception | None = None
    if everyones is not None:
        try:
            write(everyones)
        except Exception as error:  # the other ranks wait for the outcome
            cause = error
            outcome[0] = f"rank 0 could not write {path}: {type(error).__name__}: {error}"
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise RuntimeError(outcome[0]) from cause


def _format_of(path: str | os.PathLike[str], given: str | None) -> str:
    wanted = Path(path).suffix.removeprefix(".") if given is None else given
    if wanted not in FORMATS:
        raise ValueError(
            f"format {wanted!r} is not known: end the name in .json or .csv, or pass format='json' "
            "or 'csv'"
        )
    return wanted


def _rows(rank: int, summary: dict[str, dict[int, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    for operation, records in summary.items():
        for _, record in sorted(records.items()):
            row = {"rank": rank, "operation": operation, **record}
            yield {column: row[column] for column in COLUMNS}


def write_log(everyones: list[Any], path: str | os.PathLike[str], format: str | None) -> None:
    """Writes the own_log() of all ranks, in rank order. Raises ValueError for an unknown format."""
    wanted = _format_of(path, format)
    rows = [row for rank, own in enumerate(everyones) for row in _rows(rank, own["summary"])]
    if wanted == "csv":
        return write_csv(path, COLUMNS, rows)
    content = {
        "world_size": len(everyones),
        "timestamp": datetime.datetime.now().astimezone().isoformat(),
        "hosts": [own["host"] for own in everyones],
        "records": rows,
    }
    write_json(path, content)


def own_log(summary: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """This rank's part of the file. summary: CommsLogger.get_summary()."""
    return {"host": socket.gethostname(), "summary": summary}
