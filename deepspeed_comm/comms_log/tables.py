"""The tables that log_summary() prints."""

from __future__ import annotations

from typing import Any

from deepspeed_comm.comms_log.summary import convert_size

_COLUMN = 20


def _row(cells: list[str]) -> str:
    return "".join(f"{cell: <{_COLUMN}}" for cell in cells).rstrip()


def deepspeed(summary: dict[str, Any]) -> str:
    """DeepSpeed's table, with two percentiles added; 180 columns wide."""
    heads = ["Comm. Op", "Message Size", "Count", "Total Latency(ms)", "Avg Latency(ms)"]
    ours = ["p50 Latency(ms)", "p99 Latency(ms)"]  # DeepSpeed has no percentiles
    lines = [_row([*heads, "tput_avg (Gbps)", "busbw_avg (Gbps)", *ours])]
    for name, records in summary.items():
        lines.append(name)
        for size, row in sorted(records.items()):
            numbers = ("total_latency_ms", "avg_latency_ms", "tput_avg_gbps", "busbw_avg_gbps")
            figures = [f"{row[key]:.2f}" for key in numbers]
            figures += [f"{row[key]:.3f}" for key in ("p50_latency_ms", "p99_latency_ms")]
            lines.append(_row(["", convert_size(size), str(row["count"]), *figures]))
    return "\n".join(lines)


# The columns of the compact table: heading, key of the summary, decimals, width.
_COMPACT = (
    ("count", "count", 0, 9),
    ("total ms", "total_latency_ms", 1, 13),
    ("avg ms", "avg_latency_ms", 3, 11),
    ("p50 ms", "p50_latency_ms", 3, 11),
    ("p99 ms", "p99_latency_ms", 3, 11),
    ("algbw Gbps", "tput_avg_gbps", 2, 12),
    ("busbw Gbps", "busbw_avg_gbps", 2, 12),
)
_COMPACT_SIZE = 21


def compact(summary: dict[str, Any]) -> str:
    """A table of at most 100 columns, unless a name is longer."""
    lines = [
        f"{'operation, size': <{_COMPACT_SIZE}}"
        + "".join(f"{head: >{width}}" for head, _, _, width in _COMPACT)
    ]
    for name, records in summary.items():
        lines.append(name)
        for size, row in sorted(records.items()):
            cells = (f"{row[key]: >{width}.{digits}f}" for _, key, digits, width in _COMPACT)
            lines.append(f"{'  ' + convert_size(size): <{_COMPACT_SIZE}}" + "".join(cells))
    return "\n".join(lines)


def stragglers(found: dict[str, Any]) -> str:
    """DeepSpeed's table of the time lost to stragglers, from summary.stragglers()."""
    heads = ["Comm. Op", "Message Size", "Count", "Total comm lat(ms)", "Total straggler(ms)"]
    lines = [
        "Breakdown with straggler effect",
        "-------------------------------",
        _row([*heads, "Avg comm lat(ms)", "Avg straggler(ms)"]),
    ]
    for name, records in found.items():
        lines.append(name)
        for size, row in sorted(records.items()):
            numbers = ("total_comm_lat_ms", "total_straggler_ms", "avg_comm_lat_ms")
            figures = [f"{row[key]:.2f}" for key in (*numbers, "avg_straggler_ms")]
            lines.append(_row(["", convert_size(size), str(row["count"]), *figures]))
    return "\n".join(lines)
