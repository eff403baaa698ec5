"""The processor, and the CPUs that this process may run on, as Linux reports them."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")


def processor_name() -> str:
    """The processor's model, or the architecture if Linux does not name it."""
    with contextlib.suppress(OSError):  # /proc/cpuinfo may be missing
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
        if found:
            return found[1]
    return platform.machine()


def describe_place() -> str:
    """The host, the CPUs that this process may run on, and their packages, NUMA nodes and L3s."""
    cpus = sorted(os.sched_getaffinity(0))

    def count(what: str, marks: Callable[[Path], list[str]]) -> str:
        places = {mark for cpu in cpus for mark in marks(_CPUS / f"cpu{cpu}")}
        return f"{len(places)} {what}{'' if len(places) == 1 else 's'}" if places else ""

    def text_of(name: str) -> Callable[[Path], list[str]]:
        return lambda cpu: [(cpu / name).read_text()] if (cpu / name).exists() else []

    parts = (
        count("package", text_of("topology/physical_package_id")),
        count("NUMA node", lambda cpu: [node.name for node in cpu.glob("node[0-9]*")]),
        count("L3", text_of("cache/index3/shared_cpu_list")),
    )
    return f"{platform.node()}, cpus {ranges(cpus)} ({', '.join(filter(None, parts))})"


def core_count(cpus: set[int]) -> int:
    """The number of cores of these CPUs; CPUs whose core is unknown count as one core each."""
    siblings = {_siblings(cpu) or str(cpu) for cpu in cpus}
    return len(siblings)


def _siblings(cpu: int) -> str:
    with contextlib.suppress(OSError):  # a container may hide the file
        return (_CPUS / f"cpu{cpu}" / "topology/thread_siblings_list").read_text().strip()
    return ""


def ranges(numbers: list[int]) -> str:
    """Formats ascending numbers like the kernel: 0-3,8."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
