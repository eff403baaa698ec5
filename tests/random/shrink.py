"""Makes a failing program smaller: fewer ranks, groups, steps and settings, simpler calls.

A candidate counts as failing if it fails in the same way as the original. Failures may be races, so
a candidate is run several times before it counts as passing. Only whole units are removed: a call
with its waits, a send with its receive, a group with all of its steps. So the rest still cannot
deadlock.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from program import Program, Step, members

KINDS = (
    "HANG",
    "CRASH",
    "WRONG VALUE",
    "though all it needs was published",
    "succeeded",
    "nobody was told",
    "left behind",
    "does not name",
    "tells of no abort",
    "WALKER",
)


def kind_of(problems: list[str]) -> str:
    """The kind of the worst problem, which a smaller program must share."""
    text = "\n".join(problems)
    return next((kind for kind in KINDS if kind in text), "other" if problems else "")


def units(program: Program) -> list[set[int]]:
    """Sets of steps that must stay together."""
    groups: dict[str, set[int]] = {}
    found: dict[int, set[int]] = {}
    sends: dict[Any, list[int]] = defaultdict(list)
    receives: dict[Any, list[int]] = defaultdict(list)
    any_tags = {s["tag"] for s in program["steps"] if s["do"] == "receive" and s["peer"] is None}
    for step in program["steps"]:
        if step["do"] == "wait":
            found[step["of"]].add(step["id"])
            continue
        found[step["id"]] = {step["id"]}
        if step["do"] == "group":
            groups[step["group"]] = found[step["id"]]
        if step["do"] in ("send", "receive"):
            ends = (step["rank"], step["peer"])
            source, target = ends if step["do"] == "send" else ends[::-1]
            key = (step["group"], None if step["tag"] in any_tags else source, target, step["tag"])
            (sends if step["do"] == "send" else receives)[key].append(step["id"])
    for key, ids in sends.items():
        for send, receive in zip(ids, receives[key], strict=False):
            found[send] |= found.pop(receive)
    for step in program["steps"]:
        if step.get("group") in groups and step["do"] in ("call", "send", "batch", "destroy"):
            if step["id"] in found:
                groups[step["group"]] |= found[step["id"]]
    first = program["steps"][0]["id"]
    return sorted(
        (unit for unit in found.values() if first not in unit),
        key=lambda unit: (len(unit), min(unit)),
    )


def without_steps(program: Program, gone: set[int]) -> Program | None:
    smaller = {**program, "steps": [s for s in program["steps"] if s["id"] not in gone]}
    faults = []
    for fault in program["faults"]:
        if fault.get("before") in gone:
            # The fault moves to the next remaining step.
            places = [step["id"] for step in program["steps"]]
            later = [i for i in places[places.index(fault["before"]) :] if i not in gone]
            if not later or fault["kind"] in ("skip", "change", "absent"):
                return None
            fault = {**fault, "before": later[0]}
        faults.append(fault)
    smaller["faults"] = faults
    known = {step["group"] for step in smaller["steps"] if step["do"] in ("world", "group")}
    if any(step.get("group", "") not in known | {""} for step in smaller["steps"]):
        return None
    if any(fault.get("group", "") not in known | {""} for fault in faults):
        return None
    return smaller


def without_rank(program: Program, rank: int) -> Program | None:
    """The program without this rank; the others are renumbered."""
    if program["size"] <= 2 or any(fault.get("rank") == rank for fault in program["faults"]):
        return None
    program = copy.deepcopy(program)
    gone: set[int] = set()
    number = {r: r - (r > rank) for r in range(program["size"]) if r != rank}
    members_before = {
        step["group"]: step["ranks"]
        for step in program["steps"]
        if step["do"] in ("world", "group")
    }
    for unit in units(program):
        for step in program["steps"]:
            if step["id"] in unit and step["do"] in ("send", "receive", "sleep"):
                if rank in (step["rank"], step.get("peer")):
                    gone |= unit
    for step in program["steps"]:
        if step["do"] == "wait" and step["rank"] == rank:
            gone.add(step["id"])
        if step["do"] in ("world", "group"):
            step["ranks"] = [number[r] for r in step["ranks"] if r != rank]
            if not step["ranks"]:
                gone |= next(unit for unit in units(program) if step["id"] in unit)
        if step["do"] == "batch":
            step["parts"] = [p for p in step["parts"] if rank not in (p["rank"], p["peer"])]
            for part in step["parts"]:
                part["rank"], part["peer"] = number[part["rank"]], number[part["peer"]]
        if step["do"] == "call":
            ranks = members_before[step["group"]]
            if step["root"] == rank:
                step["root"] = next((r for r in ranks if r != rank), rank)
            step["root"] = number.get(step["root"], 0)
            if rank in ranks:
                at = ranks.index(rank)
                for name in ("how", "layouts"):
                    del step[name][at]
                if "splits" in step:
                    del step["splits"][at]
                    for row in step["splits"]:
                        del row[at]
        elif step["do"] in ("send", "receive", "sleep", "wait") and step["id"] not in gone:
            if step["rank"] != rank:
                step["rank"] = number[step["rank"]]
            if step.get("peer") is not None and step["peer"] != rank:
                step["peer"] = number[step["peer"]]
    smaller = without_steps(program, gone)
    if smaller is None:
        return None
    smaller["size"] -= 1
    del smaller["endings"][rank]
    smaller["cpus"] = smaller["cpus"] and [c for r, c in enumerate(smaller["cpus"]) if r != rank]
    smaller["processes"] = [
        [number[r] for r in ranks if r != rank] for ranks in smaller["processes"] if ranks != [rank]
    ]
    for fault in smaller["faults"]:
        if "rank" in fault:
            fault["rank"] = number[fault["rank"]]
        if "root" in fault.get("to", {}):
            fault["to"]["root"] = number.get(fault["to"]["root"], 0)
    return smaller


def simpler_steps(program: Program, step: Step) -> Iterator[Step]:
    """Simpler forms of one step."""
    if step["do"] == "call":
        plain = {"layouts": [["plain", "plain"] for _ in step["how"]], "op": "SUM"}
        yield {**step, **plain, "dtype": "float32"}
        yield {**step, **plain}
        if "splits" in step:
            yield {name: value for name, value in step.items() if name != "splits"}
        yield {**step, "call": "all_reduce", "dtype": "float32", "op": "SUM"}
    if step["do"] in ("call", "send", "receive"):
        if step["do"] == "call":
            for count in (1, 40, 1000):
                if count < step["count"]:
                    yield {**step, "count": count}
            yield {**step, "how": ["sync"] * len(step["how"])}
        elif step["how"] != "sync" and step.get("small"):
            yield {**step, "how": "sync"}
    if step["do"] == "sleep":
        for ms in (1, 10):
            if ms < step["ms"]:
                yield {**step, "ms": ms}


def _drop_idle_waits(program: Program) -> Program:
    """Removes waits for calls that have become synchronous."""
    how: dict[tuple[int, int], str] = {}
    for step in program["steps"]:
        if step["do"] == "call":
            for rank, each in zip(members(program, step["group"]), step["how"], strict=True):
                how[step["id"], rank] = each
        elif step["do"] in ("send", "receive"):
            how[step["id"], step["rank"]] = step["how"]
    steps = [
        step
        for step in program["steps"]
        if step["do"] != "wait" or how.get((step["of"], step["rank"])) == "async"
    ]
    return {**program, "steps": steps}


class Shrinker:
    def __init__(
        self, fails: Callable[[Program], bool], seconds: float, say: Callable[[str], None] = print
    ) -> None:
        self.fails = fails
        self.deadline = time.monotonic() + seconds
        self.say = say

    def tries(self, candidate: Program | None) -> bool:
        return candidate is not None and time.monotonic() < self.deadline and self.fails(candidate)

    def shrink(self, program: Program) -> Program:
        before = None
        while before != program and time.monotonic() < self.deadline:
            before = copy.deepcopy(program)
            program = self.fewer_faults(program)
            program = self.fewer_ranks(program)
            program = self.fewer_steps(program)
            program = self.fewer_settings(program)
            program = self.plainer_steps(program)
            self.say(f"shrunk to {program['size']} ranks, {len(program['steps'])} steps")
        return program

    def fewer_faults(self, program: Program) -> Program:
        candidate = {**program, "faults": []}
        return candidate if program["faults"] and self.tries(candidate) else program

    def fewer_ranks(self, program: Program) -> Program:
        for rank in reversed(range(program["size"])):
            candidate = without_rank(program, rank) if rank < program["size"] else None
            if self.tries(candidate):
                assert candidate is not None
                program = candidate
        return program

    def fewer_steps(self, program: Program) -> Program:
        size = max(1, len(units(program)) // 2)
        while size >= 1:
            start = 0
            while start < len(left := units(program)):
                chunk = set().union(*left[start : start + size])
                candidate = without_steps(program, chunk)
                if self.tries(candidate):
                    assert candidate is not None
                    program = candidate
                else:
                    start += size
            size //= 2
        return program

    def fewer_settings(self, program: Program) -> Program:
        candidate = {**program, "environment": {}, "cpus": None}
        if (program["environment"] or program["cpus"]) and self.tries(candidate):
            program = candidate
        for name in list(program["environment"]):
            rest = {n: v for n, v in program["environment"].items() if n != name}
            candidate = {**program, "environment": rest}
            if name == "DSCOMM_TOPOLOGY":
                candidate["cpus"] = None
            if self.tries(candidate):
                program = candidate
        for rank in range(program["size"]):
            if program["endings"][rank] != "destroy":
                endings = list(program["endings"])
                endings[rank] = "destroy"
                if self.tries({**program, "endings": endings}):
                    program = {**program, "endings": endings}
        alone = {**program, "processes": [[rank] for rank in range(program["size"])]}
        if alone["processes"] != program["processes"] and self.tries(alone):
            program = alone
        return program

    def plainer_steps(self, program: Program) -> Program:
        for number in range(len(program["steps"])):
            if number >= len(program["steps"]):
                break
            for simpler in simpler_steps(program, program["steps"][number]):
                if simpler == program["steps"][number]:
                    continue
                steps = list(program["steps"])
                steps[number] = simpler
                candidate = _drop_idle_waits({**program, "steps": steps})
                if self.tries(candidate):
                    program = candidate
                    break
        return program
