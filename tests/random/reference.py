"""The results that a random program's ranks must get: a model, and a judge of observations.

Calls of a group match by number: the k-th call of a rank matches the k-th calls of the others.
Messages of one source, target and tag match in the order of sending. Every operation of every rank
then is one of

  OK    all that it needs is published, whatever happens to others: it must succeed
  FAIL  something that it needs is never published: it must raise an error
  MAY   either

and a success must have the right value in every case. Publication counts: once a rank has completed
its part of a call, it may end in any way, and no other rank may fail in that call because of it.

If the moment of a fault is random, the faulty rank's own report shows what it had completed.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections import defaultdict
from typing import Any

import torch
from program import (
    COALESCED,
    COALESCED_REDUCING,
    COUNT_COMPARED,
    ROOTED,
    Program,
    Step,
    actions,
    members,
)
from rank import match_id_of, object_of
from values import checksum, joined, moved_input, reduction

OK, MAY, FAIL = "ok", "may", "fail"
NEVER = 1 << 30
MONITORED = "!"
# The machine's delays: added to the timeout before a rank counts as hung.
SLACK_S = 12.0
# Faults that others notice by a timeout, during which they keep third ranks waiting.
OF_TIME = ("skip", "change", "stop_long", "absent")
DEADLY = ("kill", "kill_at", "exit", "raise", "absent")


@dataclasses.dataclass
class Outcome:
    """A rank's report of one of its actions."""

    what: str = "unmade"  # unmade, begin, started, done, error, absent
    values: list[Any] = dataclasses.field(default_factory=list)
    kind: str = ""
    text: str = ""
    began: float = 0.0
    ended: float = 0.0
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    told: str = ""  # the error of leaving the former groups, before it made new ones


@dataclasses.dataclass
class Observed:
    reports: list[dict[int, Outcome]]  # by rank, then by the number of the action
    exits: list[int | None]  # by process: exit code, negative for a signal, None if it hung
    pids: list[int]
    outputs: list[str]
    left_behind: str = ""
    hung: str = ""
    seconds: float = 0.0


@dataclasses.dataclass
class Operation:
    rank: int
    group: str
    kind: str  # call, send, receive, form
    step: Step
    issued: int  # the action that starts it
    completed: int  # the action after which it is known to be done, or NEVER
    place: int  # index in the program's steps
    certain: bool = True  # certainly made and completed, as far as its own rank goes
    status: str = OK
    reason: str = ""
    partner: Operation | None = None  # the other end of a message
    sources: list[Operation] = dataclasses.field(default_factory=list)  # senders, of any source

    def weaken(self, status: str, reason: str) -> bool:
        if self.status == OK or (self.status == MAY and status == FAIL):
            self.status, self.reason = status, reason
            return True
        return False


@dataclasses.dataclass
class Call:
    """One call as the group counts them: a coalesced call counts as several."""

    operation: Operation
    part: int
    descriptor: tuple[Any, ...]


def parse_report(text: str) -> dict[int, Outcome]:
    found: dict[int, Outcome] = defaultdict(Outcome)
    for line in text.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue  # cut off by a death
        outcome = found[said["n"]]
        if said["what"] == "told":
            outcome.told += said["text"]
            continue
        if said["what"] == "begin":
            outcome.began = said["t"]
        outcome.what, outcome.ended = said["what"], said["t"]
        outcome.values = said.get("values") or []
        outcome.kind, outcome.text = said.get("kind", ""), said.get("text", "")
        outcome.extra = said
    return found


def needs(step: Step, rank: int, ranks: list[int]) -> list[int]:
    """The ranks whose data this rank waits for in this call."""
    others = [each for each in ranks if each != rank]
    kind = step["call"]
    if kind in ("barrier", "monitored_barrier"):
        return others
    if kind in ("broadcast", "scatter", "broadcast_object", "scatter_object"):
        wanted = [] if rank == step["root"] else [step["root"]]
    elif kind in ("reduce", "gather", "gather_object"):
        wanted = others if rank == step["root"] else []
    else:
        wanted = others
    if kind.endswith("object"):
        return wanted
    if kind in COALESCED:
        return wanted if max(step["counts"]) > 0 else []
    if "splits" in step:
        me = ranks.index(rank)
        rows = {each: step["splits"][ranks.index(each)] for each in ranks}
        if kind == "all_gather":
            return [each for each in wanted if rows[each][0] > 0]
        if kind == "reduce_scatter":
            return wanted if rows[rank][0] > 0 else []
        return [each for each in wanted if rows[each][me] > 0]
    return wanted if step["count"] > 0 else []


def order_of(step: Step) -> str:
    """The order in which this call counts: its group's; monitored barriers have their own."""
    group: str = step["group"]
    return group + MONITORED if step["call"] == "monitored_barrier" else group


def descriptors(step: Step) -> list[tuple[Any, ...]]:
    kind = step["call"]
    if kind == "inference_all_reduce":
        kind = "all_reduce"
    if kind in COALESCED:
        if kind == "manager_reduce_scatter":
            of_one = ("reduce_scatter_tensor", step["dtype"], step["op"], "", "")
            return [of_one] * len(step["counts"])
        single = "all_reduce" if kind in COALESCED_REDUCING else "all_gather"
        return [(single, step["dtype"], step["op"], count) for count in step["counts"]]
    if kind == "all_reduce_caching":
        return [(kind, match_id_of(step))]
    if kind in ("barrier", "monitored_barrier"):
        return [(kind,)]
    if kind.endswith("object"):
        # Ranks exchange the lengths of their objects, so any two such calls match.
        return [(kind, step["root"] if kind in ROOTED else "")]
    return [
        (
            kind,
            step["dtype"],
            step["op"] if "reduce" in kind else "",
            step["count"] if kind in COUNT_COMPARED else "",
            step["root"] if kind in ROOTED else "",
        )
    ]


class Model:
    def __init__(self, program: Program, observed: Observed) -> None:
        self.program = program
        self.observed = observed
        self.fault: Step = (program["faults"] or [{"kind": ""}])[0]
        self.fault_kind: str = self.fault["kind"]
        self.faulty: int = self.fault.get("rank", -1)
        self.ranks = range(program["size"])
        self.places = {step["id"]: n for n, step in enumerate(program["steps"])}
        self.place_of_fault = self.places.get(self.fault.get("before", -1), NEVER)
        if self.fault_kind in ("stop_long",):
            self.place_of_fault = -1
        self.operations: dict[tuple[int, int], Operation] = {}
        self.calls: dict[str, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
        self.forms: dict[str, dict[int, Operation]] = defaultdict(dict)
        self.place_of_patience = NEVER  # step from which ranks may wait for others' timeouts
        self.disagreeing: set[str] = set()  # groups whose ranks make different calls
        self.doomed: set[str] = set()  # groups that cannot be made
        self.actions = [actions(program, rank) for rank in self.ranks]
        for rank in self.ranks:
            self.collect(rank)
        self.match_calls()
        self.match_messages()
        self.spread()

    # --- the operations

    def collect(self, rank: int) -> None:
        mine = self.actions[rank]
        report = self.observed.reports[rank]
        dies = rank == self.faulty and self.fault_kind in DEADLY
        by_step: dict[int, Operation] = {}

        def add(kind: str, step: Step, number: int, completed: int) -> None:
            operation = Operation(
                rank, step["group"], kind, step, number, completed, self.places.get(place, -1)
            )
            if dies:
                # Started, and perhaps done: its own report shows what it had completed.
                if report[number].what == "unmade":
                    return
                at = report[completed].what if completed != NEVER else "begin"
                operation.certain = at == "done"
            elif completed == NEVER:
                operation.certain = False
            self.operations[rank, step["id"]] = by_step[step["id"]] = operation
            if kind == "call":
                for part, descriptor in enumerate(descriptors(step)):
                    self.calls[order_of(step)][rank].append(Call(operation, part, descriptor))
            if kind == "form":
                self.forms[step["group"]][rank] = operation

        for number, action in enumerate(mine):
            place = action["id"]
            if action["do"] in ("world", "group"):
                if rank in action["ranks"]:
                    add("form", action, number, number)
            elif action["do"] == "call":
                ranks = members(self.program, action["group"])
                how = action["how"][ranks.index(rank)]
                add("call", action, number, number if how == "sync" else NEVER)
            elif action["do"] in ("send", "receive"):
                add(action["do"], action, number, number if action["how"] == "sync" else NEVER)
            elif action["do"] == "batch":
                for part in action["parts"]:
                    if part["rank"] == rank:
                        add(part["do"], part, number, number)
            elif action["do"] == "wait" and action["of"] in by_step:
                waited = by_step[action["of"]]
                waited.completed = number
                waited.certain = not dies or report[number].what == "done"
            if action["do"] in ("destroy", "leave", "world"):
                # Destroying a group first finishes its queued collectives.
                ending = action["group"] if action["do"] != "world" else None
                for operation in by_step.values():
                    if ending in (None, operation.group) and operation.kind == "call":
                        if operation.completed == NEVER and operation.issued < number:
                            operation.completed = number
                            operation.certain = not dies or report[number].what == "done"
        if self.program["endings"][rank] == "destroy" and not dies:
            for operation in by_step.values():
                if operation.kind == "call" and operation.completed == NEVER:
                    operation.completed, operation.certain = len(mine), True
        if self.fault_kind in ("abort", "leave") and rank == self.faulty:
            at = next((n for n, a in enumerate(mine) if a["do"] == self.fault_kind), NEVER)
            for operation in by_step.values():
                # A leaving rank first finishes collectives, and abandons messages.
                if self.fault_kind == "leave" and operation.kind == "call":
                    continue
                if operation.group == self.fault["group"] and operation.completed > at:
                    operation.certain = False

    # --- the flow of data

    def match_calls(self) -> None:
        for group, calls in self.calls.items():
            ranks = members(self.program, group.removesuffix(MONITORED))
            longest = max(len(mine) for mine in calls.values())
            lists = {rank: calls.get(rank, []) for rank in ranks}
            agree: dict[tuple[int, int], bool] = {(a, b): True for a in ranks for b in ranks}
            failed: set[int] = set()
            for k in range(longest):
                at = {rank: mine[k] if k < len(mine) else None for rank, mine in lists.items()}
                for a, b in agree:
                    left, right = at[a], at[b]
                    both_leave = self.leaves(a, group) and self.leaves(b, group)
                    if left is not None and right is not None:
                        if left.descriptor != right.descriptor:
                            agree[a, b] = False
                            if both_leave:
                                self.disagreeing.add(group)
                    elif left is not None or right is not None:
                        if self.fault_kind == "skip" and both_leave:
                            self.disagreeing.add(group)
                fail_here = set()
                for rank, call in at.items():
                    if call is None:
                        continue
                    if all(
                        other is not None and other.operation.certain and agree[rank, who]
                        for who, other in at.items()
                    ):
                        continue
                    missing = [
                        who
                        for who in needs(call.operation.step, rank, ranks)
                        if at[who] is None or not agree[rank, who] or who in failed
                    ]
                    if rank in failed or missing:
                        text = f"call {k}: needs ranks {missing}, which do not make this call"
                        call.operation.weaken(FAIL, text)
                        fail_here.add(rank)
                    else:
                        call.operation.weaken(MAY, f"call {k}: not all ranks surely complete it")
                failed |= fail_here

    def leaves(self, rank: int, group: str) -> bool:
        """Whether a rank leaves this group in order. Of two such ranks, the later one detects that
        their calls differed, unless it is known already."""
        group = group.removesuffix(MONITORED)
        return rank not in self.quiet_exits() or any(
            action["do"] == "destroy" and action["group"] == group for action in self.actions[rank]
        )

    def match_messages(self) -> None:
        classes: dict[tuple[str, int | None, int, int], tuple[list[Any], list[Any]]]
        classes = defaultdict(lambda: ([], []))
        for operation in self.operations.values():
            step = operation.step
            if operation.kind == "receive":
                key = (operation.group, step["peer"], operation.rank, step["tag"])
                classes[key][1].append(operation)
        for operation in self.operations.values():
            step = operation.step
            if operation.kind == "send":
                key = (operation.group, operation.rank, step["peer"], step["tag"])
                if (any_key := (operation.group, None, step["peer"], step["tag"])) in classes:
                    key = any_key
                classes[key][0].append(operation)
        for (_, source, _, _), (sends, receives) in classes.items():
            sends.sort(key=lambda each: (each.issued, each.place))
            receives.sort(key=lambda each: (each.issued, each.place))
            if source is None:
                for receive in receives:
                    receive.sources = sends
                    if len(sends) < len(receives):
                        receive.weaken(MAY, "not every receive has a send")
                    elif not all(send.certain for send in sends):
                        receive.weaken(MAY, "a send of this tag may not have been made")
                for send in sends:
                    if len(sends) != len(receives):
                        send.weaken(MAY, "not every send has a receive")
                    elif not all(receive.certain for receive in receives):
                        send.weaken(MAY, "its receive may not have been completed")
                continue
            for send, receive in zip(sends, receives, strict=False):
                send.partner, receive.partner = receive, send
                data = [(each.step["dtype"], each.step["count"]) for each in (send, receive)]
                if data[0] != data[1]:
                    send.weaken(MAY, "differs from its receive")
                    receive.weaken(FAIL, "differs from its send")
                if not send.certain:
                    receive.weaken(MAY, "its send may not have been completed")
                if not receive.certain:
                    send.weaken(MAY, "its receive may not have been completed")
            for send in sends[len(receives) :]:
                send.weaken(MAY, "nobody receives it")
            for receive in receives[len(sends) :]:
                receive.weaken(FAIL, "nobody sends it")

    # --- the consequences

    def spread(self) -> None:
        every = list(self.operations.values())
        self.spread_formation()
        if self.fault_kind in OF_TIME:
            for operation in every:
                if operation.place >= self.place_of_fault or self.place_of_fault == NEVER:
                    operation.weaken(MAY, "others may be kept waiting by the fault")
        if self.fault_kind in ("abort", "leave"):
            for operation in every:
                if operation.group == self.fault["group"]:
                    if operation.rank == self.faulty and not operation.certain:
                        operation.weaken(MAY, "given up")
        changed = True
        while changed:
            changed = False
            unclean = {each.group for each in every if each.status != OK}
            weak = defaultdict(list)
            for each in every:
                if each.status != OK:
                    weak[each.rank, each.group].append(each)
                    changed |= self.spread_patience(each)
            for each in every:
                if each.status != OK:
                    continue
                for other in weak[each.rank, each.group]:
                    # The parts of a batch have one outcome.
                    if other.issued < each.completed or other.issued == each.issued:
                        text = "an earlier operation of this group, or of its batch, may fail"
                        changed |= each.weaken(MAY, text)
                        break
                if each.status == OK and each.kind in ("send", "receive"):
                    changed |= self.spread_to_message(each, unclean)
            for group, calls in self.calls.items():
                ranks = members(self.program, group.removesuffix(MONITORED))
                for k in range(max(len(mine) for mine in calls.values())):
                    at = [calls[rank][k] for rank in ranks if k < len(calls.get(rank, []))]
                    if any(call.operation.status != OK for call in at):
                        for call in at:
                            text = f"call {k}: another rank may fail in it"
                            if not self.died_after(call, at):
                                changed |= call.operation.weaken(MAY, text)

    def spread_patience(self, weak: Operation) -> bool:
        """A receive from any source waits while a possible sender lives. So its rank may wait for
        the timeout, and be late in all later steps."""
        if weak.kind != "receive" or weak.step["peer"] is not None:
            return False
        self.place_of_patience = min(self.place_of_patience, weak.place)
        return any(
            [
                each.weaken(MAY, "a receive from any source may have waited for its timeout before")
                for each in self.operations.values()
                if each.rank == weak.rank and each.completed > weak.issued
            ]
        )

    def died_after(self, call: Call, at: list[Call]) -> bool:
        """Whether only the faulty rank's own part is in doubt, and it has completed that."""
        weak = [each.operation for each in at if each.operation.status != OK]
        return all(each.rank == self.faulty and each.certain for each in weak)

    def quiet_exits(self) -> list[int]:
        """Ranks that end without leaving their groups, which others see as deaths."""
        return [
            rank
            for rank in self.ranks
            if self.program["endings"][rank] == "exit"
            or (rank == self.faulty and self.fault_kind in DEADLY)
        ]

    def spread_to_message(self, each: Operation, unclean: set[str]) -> bool:
        partners = each.sources if each.sources else [each.partner] if each.partner else []
        if each.kind == "receive":
            # Messages sent before a rank's death arrive, whatever happens to the group.
            if partners and all(p.rank == self.faulty and p.certain for p in partners):
                if self.fault_kind in DEADLY:
                    return False
            if any(p.status != OK and p.rank != self.faulty for p in partners):
                return each.weaken(MAY, "its send may fail")
        elif any(p.status != OK for p in partners):
            return each.weaken(MAY, "its receive may fail")
        if each.group in unclean:
            return each.weaken(MAY, "the group may have ended by another operation")
        return False

    def spread_formation(self) -> None:
        for group, made in self.forms.items():
            ranks = members(self.program, group)
            missing = [rank for rank in ranks if rank not in made]
            unsure = [rank for rank, operation in made.items() if not operation.certain]
            if missing:
                self.doomed.add(group)
                for operation in made.values():
                    operation.weaken(FAIL, f"rank {missing[0]} never makes the group")
                    self.place_of_fault = min(self.place_of_fault, operation.place)
                    self.fault_kind = "absent"
            elif unsure:
                for operation in made.values():
                    operation.weaken(MAY, f"rank {unsure[0]} may not have made the group")
            if missing or unsure:
                self.doubt(group)
        world_is_sure = True
        for step in self.program["steps"]:
            if step["do"] == "world":
                made = self.forms[step["group"]]
                world_is_sure = all(operation.status == OK for operation in made.values())
            elif step["do"] == "group" and not world_is_sure:
                for operation in self.forms[step["group"]].values():
                    operation.weaken(MAY, "its world may not be there")
                self.doubt(step["group"])

    def doubt(self, group: str) -> None:
        for operation in self.operations.values():
            if operation.group == group and operation.kind != "form":
                operation.status, operation.reason = MAY, "the group may not be there"

    # --- values

    def expected(self, operation: Operation) -> list[Any] | None:
        """Checksums of the results of a successful operation; None if several results are right."""
        step, rank = operation.step, operation.rank
        if operation.kind == "send":
            return []
        if operation.kind == "receive":
            if operation.partner is None:
                return None
            send = operation.partner.step
            values = moved_input(send["dtype"], send["count"], (send["id"], 0))
            return [[operation.partner.rank, *checksum(values)]]
        ranks = members(self.program, operation.group)
        mine = self.calls[order_of(step)][rank]
        number = next(n for n, call in enumerate(mine) if call.operation is operation)
        steps: dict[int, Step] = {}
        for who in ranks:
            theirs = self.calls[order_of(step)].get(who, [])
            steps[who] = theirs[number].operation.step if number < len(theirs) else step
        return expected_values(step, rank, ranks, steps)


def expected_values(step: Step, rank: int, ranks: list[int], steps: dict[int, Step]) -> list[Any]:
    """`steps`: each rank's version of this call, from which its input derives."""
    ids = {who: each["id"] for who, each in steps.items()}
    kind, dtype, op, count, root = (step[key] for key in ("call", "dtype", "op", "count", "root"))
    me, size = ranks.index(rank), len(ranks)
    splits = step.get("splits", [[count] * size] * size)

    def reduced(part: int, elements: int) -> torch.Tensor:
        return reduction(dtype, op, elements, [(ids[who], who, part) for who in ranks])

    def moved(who: int, part: int, elements: int) -> torch.Tensor:
        return moved_input(dtype, elements, (ids[who], who, part))

    if kind in ("barrier", "monitored_barrier"):
        return []
    if kind in ("all_reduce", "inference_all_reduce", "all_reduce_caching"):
        tensors = [reduced(0, count)]
    elif kind == "reduce":
        own = reduction(dtype, "SUM", count, [(ids[rank], rank, 0)])
        if op == "PRODUCT":
            own = reduction(dtype, op, count, [(ids[rank], rank, 0)])
        tensors = [reduced(0, count) if rank == root else own]
    elif kind == "broadcast":
        tensors = [moved(root, 0, count)]
    elif kind == "all_gather":
        tensors = [moved(who, 0, splits[n][0]) for n, who in enumerate(ranks)]
    elif kind == "all_gather_into_tensor":
        tensors = [joined([moved(who, 0, count) for who in ranks])]
    elif kind == "gather":
        tensors = [moved(who, 0, count) for who in ranks] if rank == root else []
    elif kind == "scatter":
        tensors = [moved(root, me, count)]
    elif kind == "reduce_scatter":
        tensors = [reduced(me, splits[me][0])]
    elif kind == "reduce_scatter_tensor":
        tensors = [reduced(0, count * size)[me * count : (me + 1) * count]]
    elif kind == "all_to_all":
        tensors = [moved(who, me, splits[n][me]) for n, who in enumerate(ranks)]
    elif kind == "all_to_all_single":
        parts = []
        for n, who in enumerate(ranks):
            start = sum(splits[n][:me])
            whole = moved(who, 0, sum(splits[n]))
            parts.append(whole[start : start + splits[n][me]])
        tensors = [joined(parts)]
    elif kind in ("all_reduce_coalesced", "manager_all_reduce"):
        tensors = [reduced(k, each) for k, each in enumerate(step["counts"])]
    elif kind == "manager_reduce_scatter":
        wholes = [(each, reduced(k, each * size)) for k, each in enumerate(step["counts"])]
        tensors = [whole[me * each : (me + 1) * each] for each, whole in wholes]
    elif kind in ("manager_all_gather", "all_gather_coalesced"):
        counts = enumerate(step["counts"])
        tensors = [joined([moved(who, k, each) for who in ranks]) for k, each in counts]
    elif kind == "all_gather_object":
        return [object_of(ids[who], who, steps[who]["count"]) for who in ranks]
    elif kind == "gather_object":
        if rank != root:
            return []
        return [object_of(ids[who], who, steps[who]["count"]) for who in ranks]
    elif kind == "scatter_object":
        return [object_of(ids[root], rank, steps[root]["count"])]
    else:
        return [object_of(ids[root], root, steps[root]["count"])]
    return [checksum(tensor) for tensor in tensors]


# --- the judge


class Judge:
    def __init__(self, program: Program, observed: Observed) -> None:
        self.program, self.observed = program, observed
        self.model = Model(program, observed)
        self.problems: list[str] = []
        self.told = False

    def blame(self, rank: int, text: str) -> None:
        self.problems.append(f"rank {rank}: {text}")

    def run(self) -> list[str]:
        self.judge_processes()
        for rank in self.model.ranks:
            self.judge_rank(rank)
        self.judge_any_source()
        self.judge_disagreements()
        if self.observed.left_behind:
            self.problems.append(f"left behind: {self.observed.left_behind}")
        return self.problems

    def judge_processes(self) -> None:
        fault = (self.program["faults"] or [{"kind": ""}])[0]
        for index, ranks in enumerate(self.program["processes"]):
            code = self.observed.exits[index]
            if code is None:
                self.blame(ranks[0], f"HANG: its process does not end\n{self.observed.hung}")
                continue
            allowed = {0}
            if fault.get("rank") in ranks:
                allowed |= {"kill": {-9}, "kill_at": {-9}, "absent": {-9}, "raise": {1}}.get(
                    fault["kind"], set()
                )
            if code not in allowed:
                end = f"signal {-code}" if code < 0 else f"code {code}"
                self.blame(ranks[0], f"CRASH: {end}\n{self.observed.outputs[index][-3000:]}")

    def outcome(self, operation: Operation) -> Outcome:
        report = self.observed.reports[operation.rank]
        started = report[operation.issued]
        if operation.completed in (operation.issued, NEVER) or started.what == "error":
            return started
        if operation.completed == len(self.model.actions[operation.rank]):
            return self.at_end(operation, report[-1])
        ended = report[operation.completed]
        action = self.model.actions[operation.rank][operation.completed]
        if action["do"] == "wait":
            return ended
        return self.at_end(operation, ended)

    @staticmethod
    def at_end(operation: Operation, ended: Outcome) -> Outcome:
        """The final result of a dropped Work: its tensors when the group has been destroyed."""
        dropped = dict(ended.extra.get("dropped") or {})
        for values in ended.values:
            if isinstance(values, dict):
                dropped.update(values)
        found = dropped.get(operation.group, {}).get(str(operation.step["id"]))
        if found is None:
            return Outcome("begin")
        return Outcome("done", found, began=ended.began, ended=ended.ended)

    def judge_rank(self, rank: int) -> None:
        limit = (
            self.program["timeout_s"]
            + SLACK_S
            + sum(fault.get("for_ms", 0) / 1000 for fault in self.program["faults"])
        )
        if self.model.fault_kind in OF_TIME:
            limit += self.program["timeout_s"]
        for number, outcome in self.observed.reports[rank].items():
            if outcome.ended - outcome.began > limit:
                self.blame(rank, f"action {number} took {outcome.ended - outcome.began:.1f} s")
        faulty_ends = rank == self.model.faulty and self.model.fault_kind in DEADLY
        failed_at: dict[str, int] = {}
        receive_failed_at: dict[str, int] = {}
        unmade: set[str] = set()  # groups
        own = [each for (who, _), each in self.model.operations.items() if who == rank]
        own.sort(key=lambda each: each.issued)
        for operation in own:
            outcome = self.outcome(operation)
            name = f"{describe(operation)}"
            if outcome.what == "error":
                self.told = True
                if operation.status == OK and not self.may_be_lost:
                    self.blame(
                        rank, f"{name} failed, though all it needs was published: {outcome.text}"
                    )
                else:
                    self.judge_error(operation, outcome, name)
            elif outcome.what == "done":
                if operation.status == FAIL and not self.dropped(operation):
                    self.blame(rank, f"{name} succeeded; {operation.reason}")
                elif not self.dropped(operation) or (
                    operation.status == OK and not self.may_be_lost  # it may have failed unseen
                ):
                    self.judge_value(operation, outcome, name)
                # Messages sent before may still be received, until a receive has failed.
                ends = receive_failed_at if operation.kind == "receive" else failed_at
                if ends.get(operation.group, NEVER) < operation.issued:
                    if not self.dropped(operation):
                        self.blame(rank, f"{name} succeeded after its group had ended")
            elif outcome.what == "absent":
                needs = {operation.group} if operation.kind != "form" else unmade
                if operation.status == OK and not (self.may_be_lost and needs & unmade):
                    self.blame(rank, f"{name} could not be made")
            elif not faulty_ends and operation.completed != NEVER and operation.status == OK:
                if not self.observed.hung:
                    self.blame(rank, f"{name} has no outcome ({outcome.what})")
            if outcome.what in ("error", "absent") and operation.kind == "form":
                unmade.add(operation.group)
            if outcome.what == "error" and operation.kind != "form":
                at = operation.completed if outcome.extra["n"] != operation.issued else -1
                at = operation.issued if at == -1 else at
                failed_at[operation.group] = min(at, failed_at.get(operation.group, NEVER))
                if operation.kind == "receive" and not self.beside_a_send(operation):
                    before = receive_failed_at.get(operation.group, NEVER)
                    receive_failed_at[operation.group] = min(at, before)
        self.judge_other_actions(rank)

    @property
    def may_be_lost(self) -> bool:
        """Whether a rank's messages may be lost with its process, before MPI has sent them."""
        return "hosts" in self.program and self.model.fault_kind in DEADLY

    def beside_a_send(self, operation: Operation) -> bool:
        """Whether this receive's error may belong to a send of the same batch."""
        action = self.model.actions[operation.rank][operation.issued]
        return any(
            part["rank"] == operation.rank and part["do"] == "send"
            for part in action.get("parts", [])
        )

    def dropped(self, operation: Operation) -> bool:
        if operation.kind != "call":
            return False
        ranks = members(self.program, operation.group)
        return bool(operation.step["how"][ranks.index(operation.rank)] == "dropped")

    def judge_value(self, operation: Operation, outcome: Outcome, name: str) -> None:
        values = outcome.values
        report = self.observed.reports[operation.rank]
        action = self.model.actions[operation.rank][operation.issued]
        if action["do"] == "batch":
            if operation.kind == "send":
                return
            receives = [
                part
                for part in action["parts"]
                if part["rank"] == operation.rank and part["do"] == "receive"
            ]
            at = [part["id"] for part in receives].index(operation.step["id"])
            values = report[operation.issued].values[at : at + 1]
        if operation.kind in ("form", "send"):
            return
        expected = self.model.expected(operation)
        if expected is not None and values != expected:
            self.blame(rank=operation.rank, text=f"{name}: WRONG VALUE {values}, not {expected}")

    def judge_error(self, operation: Operation, outcome: Outcome, name: str) -> None:
        """Checks the text of an expected error."""
        kind, text = self.model.fault_kind, outcome.text
        if outcome.kind not in ("DistBackendError", "RuntimeError"):
            self.blame(operation.rank, f"{name} raised {outcome.kind}: {text}")
        elif operation.kind == "form":
            pass
        elif "timed out" in text and operation.place >= self.model.place_of_patience:
            pass
        elif kind == "leave" and operation.rank == self.model.faulty:
            if "was destroyed" not in text and not self.other_cause(operation, text):
                self.blame(operation.rank, f"{name}: the error is not of the leaving: {text}")
        elif kind in ("kill", "kill_at", "exit", "raise", "leave"):
            pid = self.pid_of(self.model.faulty)
            if f"pid {pid} " not in text and not self.other_cause(operation, text):
                self.blame(operation.rank, f"{name}: the error does not name pid {pid}: {text}")
        elif kind == "abort" and operation.group == self.model.fault["group"]:
            # The rank that aborted may have left since, because of its own error.
            pid = self.pid_of(self.model.faulty)
            endings = ("left the group", "ended without", "was ended by")
            has_left = f"pid {pid} " in text and any(how in text for how in endings)
            if "abort" not in text and not has_left and not self.other_cause(operation, text):
                self.blame(operation.rank, f"{name}: the error tells of no abort: {text}")

    def other_cause(self, operation: Operation, text: str) -> bool:
        """Whether the error names another rank that ended without leaving."""
        quiet = self.model.quiet_exits()
        return any(f"pid {self.pid_of(rank)} " in text for rank in quiet)

    def pid_of(self, rank: int) -> int:
        for index, ranks in enumerate(self.program["processes"]):
            if rank in ranks:
                return self.observed.pids[index]
        return -1

    def judge_other_actions(self, rank: int) -> None:
        unclean = {op.group for op in self.model.operations.values() if op.status != OK}
        for number, outcome in self.observed.reports[rank].items():
            if outcome.told:
                self.told = True
                if not unclean:
                    self.blame(rank, f"leaving all groups raised: {outcome.told}")
            if outcome.what != "error":
                continue
            if number == -1:
                self.told = True
                if not unclean:
                    self.blame(rank, f"the end of all groups raised: {outcome.text}")
                continue
            action = self.model.actions[rank][number]
            if action["do"] in ("destroy", "leave", "sleep", "abort"):
                self.told = True
                if action.get("group") not in unclean:
                    self.blame(rank, f"{action['do']} raised: {outcome.text}")
            if action["do"] == "group" and rank not in action["ranks"]:
                self.blame(rank, f"new_group without this rank raised: {outcome.text}")

    def judge_any_source(self) -> None:
        """Messages of one source must come in order, each once. A receive whose rank ended before
        waiting for it may have taken one."""
        by_tag: dict[tuple[str, int, int], list[Operation]] = defaultdict(list)
        for operation in self.model.operations.values():
            if operation.kind == "receive" and operation.step["peer"] is None:
                key = (operation.group, operation.rank, operation.step["tag"])
                by_tag[key].append(operation)
        for receives in by_tag.values():
            receives.sort(key=lambda each: each.issued)
            taken: dict[int, int] = defaultdict(int)
            unseen = 0
            for receive in receives:
                outcome = self.outcome(receive)
                if outcome.what != "done":
                    unseen += outcome.what != "error"
                    continue
                source = outcome.values[0][0]
                sends = [send for send in receive.sources if send.rank == source]
                number = taken[source]
                possible = []
                for operation in sends[number : number + unseen + 1]:
                    send = operation.step
                    values = moved_input(send["dtype"], send["count"], (send["id"], 0))
                    possible.append([[source, *checksum(values)]])
                expected = possible[0] if possible else None
                if outcome.values in possible:
                    skipped = possible.index(outcome.values)
                    unseen -= skipped
                    taken[source] += 1 + skipped
                else:
                    taken[source] += 1
                    text = f"WRONG VALUE {outcome.values}, not {expected}"
                    self.blame(receive.rank, f"{describe(receive)} (any source): {text}")

    def judge_disagreements(self) -> None:
        if not self.model.disagreeing or self.observed.hung:
            return
        said = (re.search(r"rank \d+ .*call", text) for text in self.observed.outputs)
        if self.told or any(said):
            return
        if "hosts" in self.program:
            return  # only ranks of one host compare last calls that no rank waits for
        names = ", ".join(sorted(self.model.disagreeing))
        self.problems.append(f"nobody was told that the ranks made different calls in {names}")


def describe(operation: Operation) -> str:
    step = operation.step
    if operation.kind == "call":
        what = (
            f"{step['call']}({step['dtype']}[{step['count']}], {step['op']}, root {step['root']})"
        )
    elif operation.kind == "form":
        what = "making the group"
    else:
        peer = "any" if step["peer"] is None else step["peer"]
        what = f"{operation.kind}({step['dtype']}[{step['count']}], peer {peer}, tag {step['tag']})"
    return f"step {step['id']} {what} in {operation.group} [{operation.status}]"


def judge(program: Program, observed: Observed) -> list[str]:
    """The problems in the observations; empty if there are none."""
    return Judge(program, observed).run()
