"""Random programs as plain data, and the generator that makes one from a seed.

A program is a dictionary that can be stored as JSON:

  seed, size       the seed that made it; the number of ranks
  timeout_s        of every group
  processes        the ranks of each process; several ranks in one process are threads
  environment      DSCOMM_ settings of all processes
  cpus             the processor of each rank, or null
  steps            in one order for all ranks; a rank makes those in which it takes part
  endings          of each rank: destroy, exit (os._exit without leaving), return (runs atexit)
  faults           at most one
  sabotage         a defect of a rank, for tests of the walker; usually absent

Every rank makes its steps in the order of the list, so a program without a fault cannot deadlock: a
step waits only for earlier steps of other ranks. (A send that waits for its receiver is directly
followed by its receive; messages sent ahead are few and small.)

The generator uses only what torch.distributed guarantees. tests/random/reference.py defines what
each rank must get.
"""

from __future__ import annotations

import copy
import os
import random
from typing import Any

from values import FLOAT8, LAYOUTS, MOVED, OPERATORS, REDUCED, has_meaning

Program = dict[str, Any]
Step = dict[str, Any]

REDUCING = ["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor"]
MOVING = [
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
]
COALESCED_REDUCING = ["all_reduce_coalesced", "manager_all_reduce", "manager_reduce_scatter"]
COALESCED = [*COALESCED_REDUCING, "manager_all_gather", "all_gather_coalesced"]
OBJECTS = ["all_gather_object", "broadcast_object", "gather_object", "scatter_object"]
ROOTED = [
    *("broadcast", "reduce", "gather", "scatter"),
    *("broadcast_object", "gather_object", "scatter_object"),
]
# Calls of deepspeed_comm. It has one rank per process, so ranks that are threads do not use it.
OF_DEEPSPEED = ["inference_all_reduce", "all_reduce_caching", "all_gather_coalesced"]
NEVER_ASYNCHRONOUS = [*OBJECTS, *OF_DEEPSPEED, "monitored_barrier"]
# Calls whose number of elements all ranks compare; in other calls it may differ.
COUNT_COMPARED = ["all_reduce", "broadcast", "reduce", "all_gather_into_tensor"]
ANY_TAG = 1_000_000  # tags from here on are only received from any source
PLAIN_TIMEOUT_S = 30.0
# For programs in which some wait lasts until the timeout. Three processes that start at once, on
# two cores that a drill has loaded with sixteen others, took up to 4 s to make their first group.
SHORT_TIMEOUT_S = 6.0
FORMING = ("world", "group", "destroy")

# How often each kind of fault is drawn; "" is no fault.
FAULTS = {
    "": 42,
    "kill": 9,  # SIGKILL before a step
    "kill_at": 9,  # SIGKILL at a random time
    "exit": 4,  # os._exit before a step
    "raise": 4,
    "leave": 7,  # destroys one group and goes on without it
    "abort": 8,  # aborts one group and goes on without it
    "stop": 4,  # SIGSTOP at a random time, SIGCONT within the timeout
    "skip": 5,  # omits one call
    "change": 6,  # makes one call with other arguments
}
KINDS_OF_STEPS = {
    "call": 50,
    "message": 26,
    "crossed": 3,
    "sleep": 9,
    "wait": 12,
    "receive": 8,
    "run_ahead": 2,
}
SLOW_FAULTS = {
    "stop_long": 1,  # one rank, for longer than the timeout
    "stop_all": 2,  # all ranks, for longer than the timeout
    "absent": 1,  # dies before a group is made
}


def members(program: Program, group: str) -> list[int]:
    for step in program["steps"]:
        if step["do"] in ("world", "group") and step["group"] == group:
            return list(step["ranks"])
    return []


def uses_deepspeed(program: Program) -> bool:
    return any(
        step.get("call") in OF_DEEPSPEED or step.get("is_direct") for step in program["steps"]
    )


def takes_part(program: Program, step: Step, rank: int) -> bool:
    if step["do"] in ("world", "group"):
        return True  # torch counts groups, so all ranks call new_group
    if step["do"] in ("wait", "sleep", "send", "receive"):
        return bool(step["rank"] == rank)
    if step["do"] == "batch":
        return any(part["rank"] == rank for part in step["parts"])
    return rank in members(program, step["group"])


def actions(program: Program, rank: int) -> list[Step]:
    """A rank's actions, including its faults, in order."""
    fault = next((f for f in program["faults"] if f.get("rank") == rank and "before" in f), None)
    found: list[Step] = []
    gone: set[str] = set()
    unmade: set[int] = set()
    for step in program["steps"]:
        if fault is not None and step["id"] == fault["before"]:
            kind = fault["kind"]
            if kind in ("kill", "exit", "raise", "absent"):
                return [*found, {"do": "kill" if kind == "absent" else kind, "id": -1}]
            if kind in ("leave", "abort"):
                found.append({"do": kind, "group": fault["group"], "id": -1})
                gone.add(fault["group"])
        if not takes_part(program, step, rank):
            continue
        if fault is not None and step["id"] == fault["before"]:
            if fault["kind"] == "skip":
                unmade.add(step["id"])
            elif fault["kind"] == "change":
                step = {**step, **fault["to"]}
        if step.get("group") in gone and step["do"] not in ("world", "group", "wait"):
            unmade.add(step["id"])
            unmade.update(part["id"] for part in step.get("parts", []))
        elif step["do"] == "wait" and step["of"] in unmade:
            continue
        elif step["id"] not in unmade:
            found.append(step)
    return found


class Generator:
    """Makes one program; all choices come from `self.random`."""

    def __init__(self, seed: int, slow: bool = False) -> None:
        self.random = random.Random(seed)
        self.seed = seed
        weights = {**FAULTS, **(SLOW_FAULTS if slow else {})}
        self.fault_kind = self.random.choices(list(weights), list(weights.values()))[0]
        self.size = self.random.choices([2, 3, 4, 5], [40, 30, 22, 8])[0]
        self.steps: list[Step] = []
        self.groups: dict[str, list[int]] = {}
        self.live = set(range(self.size))
        self.made = 0
        self.next_id = 0
        # Pending steps: waits, and receives of sent messages.
        self.waits: list[Step] = []
        self.receives: list[Step] = []
        self.send_of: dict[int, Step] = {}
        self.ahead: dict[tuple[int, int], int] = {}
        self.tag = ANY_TAG
        self.threads = False

    # --- parts

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def add(self, **step: Any) -> Step:
        step = {"id": self.next_id, **step}
        self.next_id += 1
        self.steps.append(step)
        return step

    def usable(self, least: int = 1) -> list[str]:
        """The groups whose members all still run."""
        return [
            name
            for name, ranks in self.groups.items()
            if len(ranks) >= least and self.live.issuperset(ranks)
        ]

    def count(self, most: int = 20000) -> int:
        ranges = [(0, 0), (1, 3), (4, 28), (29, 300), (301, 3000), (3001, 20000)]
        low, high = self.random.choices(ranges, [4, 14, 22, 26, 24, 10])[0]
        return min(most, self.random.randint(low, high))

    def layout(self, matrix: bool = True) -> str:
        weights = [12, 5, 3, 2, 2, 2 if matrix else 0]
        return self.random.choices(LAYOUTS, weights)[0]

    def settings(self) -> dict[str, str]:
        choices: dict[str, list[str]] = {
            "DSCOMM_ONE_SHOT_BYTES": ["0", "256", "1000000"],
            "DSCOMM_IN_PLACE_BYTES": ["0", "0", "1000"],
            "DSCOMM_CHANNEL_BYTES": ["4096", "139264"],
            "DSCOMM_SPIN_PAUSES": ["0", "2000"],
            "DSCOMM_YIELD_US": ["0", "2000"],
            "DSCOMM_SLEEP_SLICE_MS": ["1", "60"],
            "DSCOMM_WORKER_IDLE_MS": ["0", "5"],
            "DSCOMM_RECORDER_ENTRIES": ["0", "3"],
            "DSCOMM_POOL_BYTES": ["0", "65536"],
            "DSCOMM_ARENA_BYTES": ["16777216"],
            "DSCOMM_RELAY_HOSTS": ["2"],
        }
        found = {
            name: self.random.choice(values)
            for name, values in choices.items()
            if self.chance(0.3 if name == "DSCOMM_IN_PLACE_BYTES" else 0.12)
        }
        if self.chance(0.35):
            found["DSCOMM_STAGING_BYTES"] = self.random.choice(["16384", "32768"])
            found["DSCOMM_STAGING_CHUNK_BYTES"] = "4096"
        return found

    # --- steps

    def make_group(self) -> None:
        if len(self.groups) > 5 or len(self.live) < self.size:
            return
        count = self.random.randint(1 if self.chance(0.1) else 2, self.size)
        ranks = sorted(self.random.sample(range(self.size), count))
        name = f"g{self.made}"
        self.made += 1
        self.add(do="group", group=name, ranks=ranks)
        self.groups[name] = ranks

    def world(self) -> None:
        name = f"w{self.made}"
        self.made += 1
        self.settle()
        self.groups = {name: list(range(self.size))}
        self.add(do="world", group=name, ranks=list(range(self.size)))

    def destroy(self) -> None:
        # Not collective, so ranks that make no more calls take part too.
        names = [name for name in self.groups if name.startswith("g")]
        if names:
            name = self.random.choice(names)
            self.settle(name)
            del self.groups[name]
            self.add(do="destroy", group=name)

    def call(self) -> None:
        names = self.usable()
        if not names:
            return
        name = self.random.choice(names)
        ranks = self.groups[name]
        kinds = [*REDUCING, *MOVING, "barrier", "all_reduce", "broadcast", "broadcast"]
        kinds += self.random.choices([COALESCED, OBJECTS, ["monitored_barrier"]], [3, 2, 1])[0]
        if not self.threads:
            kinds += OF_DEEPSPEED[:2]
        kind = self.random.choice(kinds)
        if self.threads and kind in OF_DEEPSPEED:
            kind = "manager_all_gather"
        if kind == "all_reduce_caching":
            # Several calls with one match_id: the first one differs from later ones.
            dtype, count = self.random.choice(["float32", "bfloat16"]), self.count()
            for _ in range(self.random.randint(1, 4)):
                self.add_call(name, ranks, kind, dtype=dtype, op="SUM", count=count)
        else:
            self.add_call(name, ranks, kind)

    def add_call(self, name: str, ranks: list[int], kind: str, **fixed: Any) -> Step:
        reduces = kind in [*REDUCING, *OF_DEEPSPEED[:2], *COALESCED_REDUCING]
        op = "SUM"
        dtype = self.random.choice(MOVED if self.chance(0.1) else MOVED[: -len(FLOAT8)])
        if reduces:
            dtype = self.random.choice(["float32", "float32", "bfloat16", "int32", *REDUCED])
            op = self.random.choice(["SUM", "SUM", *OPERATORS])
            if op == "PREMUL_SUM" and kind in (*OF_DEEPSPEED, *COALESCED):
                op = "SUM"
            if not has_meaning(dtype, op):
                op = "SUM"
        step: Step = {
            "do": "call",
            "call": kind,
            "group": name,
            "dtype": dtype,
            "op": op,
            "root": self.random.choice(ranks),
            "count": self.count(),
        }
        if kind in ("all_to_all_single", "all_to_all", "all_gather", "reduce_scatter"):
            # Elements from each rank to each other: uneven, some zero.
            step["count"] = min(step["count"], 2000)
            if self.chance(0.5):
                step["splits"] = [
                    [self.random.choice([0, 1, 7, step["count"]]) for _ in ranks] for _ in ranks
                ]
        if kind in COALESCED:
            step["counts"] = [self.count(800) for _ in range(self.random.randint(1, 4))]
        step.update(fixed)
        hows = ["sync", "async", "dropped"]
        if kind in NEVER_ASYNCHRONOUS or kind.startswith("manager"):
            step["how"] = ["sync"] * len(ranks)
        else:
            weights = self.random.choice([[1, 0, 0], [0, 1, 0], [5, 4, 1]])
            step["how"] = [self.random.choices(hows, weights)[0] for _ in ranks]
        matrix = kind in ("all_reduce", "broadcast", "reduce")
        step["layouts"] = [[self.layout(matrix), self.layout(matrix)] for _ in ranks]
        step = self.add(**step)
        for rank, how in zip(ranks, step["how"], strict=True):
            if how == "async":
                self.waits.append({"of": step["id"], "rank": rank, "group": name})
        return step

    def wait_for(self, wait: Step) -> None:
        self.waits.remove(wait)
        by = self.random.choices(["wait", "poll", "future"], [6, 2, 1])[0]
        self.add(do="wait", by=by, **wait)

    def receive_now(self, receive: Step) -> None:
        """Emits a receive of a sent message, in the order of sending for one source and tag."""
        same = [
            each
            for each in self.receives
            if all(each[key] == receive[key] for key in ("group", "rank", "peer", "tag"))
        ]
        receive = same[0]
        self.receives.remove(receive)
        send = self.send_of.pop(id(receive), None)
        step = self.add(**receive)
        if receive["how"] == "async":
            self.waits.append({"of": step["id"], "rank": step["rank"], "group": step["group"]})
        if send is not None and send["rank"] in self.live and send["how"] == "async":
            wait = {"of": send["id"], "rank": send["rank"], "group": send["group"]}
            if wait not in self.waits and not send.get("small"):
                self.waits.append(wait)
        if receive.get("small") and send is not None:
            self.ahead[send["rank"], receive["rank"]] -= 1

    def send(self, how: str, source: int, target: int, **more: Any) -> None:
        step = self.add(do="send", rank=source, peer=target, how=how, **more)
        if how == "sync" and not self.threads and self.chance(0.4):
            step["is_direct"] = True
        receive = {
            "do": "receive",
            "rank": target,
            "peer": None if more["tag"] >= ANY_TAG else source,
            "how": self.random.choice(["sync", "sync", "async"]),
            **more,
            "layout": self.layout(),
        }
        if receive["how"] == "sync" and not self.threads and self.chance(0.4):
            receive["is_direct"] = True
        self.receives.append(receive)
        self.send_of[id(receive)] = step
        if more.get("small"):
            self.ahead[source, target] = self.ahead.get((source, target), 0) + 1
            if how == "async":
                wait = {"of": step["id"], "rank": source, "group": more["group"]}
                self.waits.append(wait)

    def message(self) -> None:
        names = self.usable(2)
        if not names:
            return
        name = self.random.choice(names)
        ranks = self.groups[name]
        kind = self.random.choices(["now", "later", "ahead", "any", "batch"], [3, 3, 5, 3, 3])[0]
        source, target = self.random.sample(ranks, 2)
        more: dict[str, Any] = {
            "group": name,
            "tag": self.random.randint(0, 2),
            "dtype": self.random.choice(MOVED[: -len(FLOAT8)]),
            "count": self.count(),
            "layout": self.layout(),
        }
        if kind == "now":
            self.send("sync", source, target, **more)
            # Receives are in the order of sending, so earlier messages with this tag come first.
            receive = self.receives[-1]
            while receive in self.receives:
                self.receive_now(receive)
        elif kind == "later":
            self.send("async", source, target, **more)
        elif kind == "ahead":
            for _ in range(self.random.randint(1, 4)):
                if self.may_be_ahead(source, target):
                    more.update(count=self.random.randint(0, 12), small=True)
                    self.send(self.random.choice(["sync", "async"]), source, target, **more)
        elif kind == "any":
            self.tag += 1
            more.update(tag=self.tag, count=self.random.randint(1, 12), small=True)
            sources = [rank for rank in ranks if rank != target]
            for source in self.random.sample(sources, self.random.randint(1, len(sources))):
                for _ in range(self.random.randint(1, 2)):
                    if self.may_be_ahead(source, target):
                        self.send(self.random.choice(["sync", "async"]), source, target, **more)
        else:
            self.batch(name, ranks, more)

    def may_be_ahead(self, source: int, target: int) -> bool:
        """Whether a send fits the channel of its two processes, whatever the receiver does."""
        if self.threads:  # all pairs may share one channel
            return sum(self.ahead.values()) < 6 and all(r.get("small") for r in self.receives)
        if self.ahead.get((source, target), 0) >= 6:
            return False
        return all(
            receive.get("small")
            for receive in self.receives
            if (receive["peer"], receive["rank"]) == (source, target)
        )

    def crossed(self) -> None:
        """Messages of one group that are received while another group is waited for."""
        names = self.usable(2)
        if len(names) < 2:
            return
        late, first = self.random.sample(names, 2)
        common = sorted(set(self.groups[late]) & set(self.groups[first]))
        if len(common) < 2:
            return
        source, target = self.random.sample(common, 2)
        more = {"dtype": "int32", "layout": "plain", "tag": self.random.randint(0, 2)}
        for group, how in ((late, "ahead"), (first, "now"), (late, "ahead")):
            for _ in range(self.random.randint(1, 2)):
                if self.may_be_ahead(source, target):
                    count = self.random.randint(1, 12)
                    self.send("sync", source, target, group=group, count=count, small=True, **more)
                    receive = self.receives[-1]
                    while how == "now" and receive in self.receives:
                        self.receive_now(receive)
            if self.chance(0.3):
                self.add(do="sleep", rank=source, ms=self.random.choice([10, 40]))

    def batch(self, name: str, ranks: list[int], more: dict[str, Any]) -> None:
        """An exchange: each of some ranks posts all of its sends and receives at once."""
        some = self.random.sample(ranks, self.random.randint(2, len(ranks)))
        tag = 50 + self.next_id  # a new tag, so that no earlier message matches
        parts: list[Step] = []
        for source in some:
            for target in some:
                if source != target and self.chance(0.6):
                    data = {"dtype": more["dtype"], "count": self.count(3000), "tag": tag}
                    send = {"do": "send", "rank": source, "peer": target, **data}
                    receive = {"do": "receive", "rank": target, "peer": source, **data}
                    for part in (send, receive):
                        part.update(id=self.next_id, group=name, layout=self.layout())
                        self.next_id += 1
                        parts.append(part)
        self.random.shuffle(parts)
        if parts:
            self.add(do="batch", group=name, parts=parts)

    def settle(self, group: str | None = None) -> None:
        """Emits the pending steps of one group, or of all."""
        while left := [r for r in self.receives if group in (None, r["group"])]:
            self.receive_now(self.random.choice(left))
        while left := [w for w in self.waits if group in (None, w["group"])]:
            self.wait_for(self.random.choice(left))

    def retire(self) -> None:
        """A rank makes no more calls; its messages are received later."""
        if len(self.live) < 2:
            return
        rank = self.random.choice(sorted(self.live))
        for receive in [r for r in self.receives if r["rank"] == rank]:
            if receive in self.receives:
                self.receive_now(receive)
        for receive in list(self.receives):
            send = self.send_of.get(id(receive))
            if receive in self.receives and send is not None and send["rank"] == rank:
                if not receive.get("small"):
                    self.receive_now(receive)
        for wait in [w for w in self.waits if w["rank"] == rank]:
            self.wait_for(wait)
        self.live.discard(rank)

    def run_ahead(self) -> None:
        """Many groups in which one rank is several calls ahead of the others."""
        for _ in range(self.random.randint(2, 6)):
            self.make_group()
        names = self.usable(2)
        if names:
            root = self.random.choice(range(self.size))
            for rank in range(self.size):
                if rank != root:
                    self.add(do="sleep", rank=rank, ms=self.random.randint(5, 60))
            for name in names:
                for _ in range(self.random.randint(1, 8)):
                    if root in self.groups[name]:
                        count = self.random.choice([4, 300, 1000])
                        step = self.add_call(
                            name, self.groups[name], "broadcast", dtype="float32", count=count
                        )
                        step["root"] = root

    # --- the whole

    def generate(self) -> Program:
        timed = self.fault_kind in ("kill_at", "stop", "stop_long", "stop_all")
        self.threads = self.fault_kind in ("", "leave", "abort", "change") and self.chance(0.12)
        self.world()
        for _ in range(self.random.choice([0, 1, 1, 2, 2, 3])):
            self.make_group()
        length = self.random.choice([3, 6, 10, 16, 24])
        retires_at = self.random.randrange(length) if self.chance(0.4) else -1
        if timed:
            length, retires_at = length + 6, -1
        for index in range(length):
            if index == retires_at:
                self.retire()
            kind = self.random.choices(
                [*KINDS_OF_STEPS, "group", "destroy", "world"],
                [*KINDS_OF_STEPS.values(), *([0, 0, 0] if timed else [8, 6, 1])],
            )[0]
            if kind == "call":
                self.call()
            elif kind == "message":
                self.message()
            elif kind == "sleep":
                rank = self.random.choice(sorted(self.live))
                self.add(do="sleep", rank=rank, ms=self.random.choice([1, 3, 10, 30]))
            elif kind == "wait" and self.waits:
                self.wait_for(self.random.choice(self.waits))
            elif kind == "receive" and self.receives:
                self.receive_now(self.random.choice(self.receives))
            elif kind == "group":
                self.make_group()
            elif kind == "destroy":
                self.destroy()
            elif kind == "world" and len(self.live) == self.size:
                self.world()
            elif kind == "crossed":
                self.crossed()
            elif kind == "run_ahead" and len(self.live) == self.size and not timed:
                self.run_ahead()
        if retires_at >= 0:
            # Some ranks are late: groups end, and time passes, before the rest is received.
            for rank in sorted(self.live):
                if self.chance(0.5):
                    self.add(do="sleep", rank=rank, ms=self.random.choice([10, 40, 80]))
            while self.chance(0.5) and any(name.startswith("g") for name in self.groups):
                self.destroy()
        self.settle()
        for name in self.usable():
            if name.startswith("g") and self.chance(0.25):
                self.add(do="destroy", group=name)
        return self.finish()

    def finish(self) -> Program:
        program: Program = {
            "seed": self.seed,
            "size": self.size,
            "timeout_s": PLAIN_TIMEOUT_S,
            "processes": [[rank] for rank in range(self.size)],
            "environment": self.settings(),
            "cpus": None,
            "steps": self.steps,
            "endings": [
                self.random.choices(["destroy", "exit", "return"], [6, 2, 2])[0]
                for _ in range(self.size)
            ],
            "faults": [],
        }
        composed = self.size >= 4 and {0, 1} <= os.sched_getaffinity(0)
        if self.chance(0.3) and composed:
            program["environment"]["DSCOMM_TOPOLOGY"] = "numa:2 core:1 pu:1"
            program["cpus"] = [self.random.choice([0, 1]) for _ in range(self.size)]
            if self.chance(0.8):
                program["cpus"] = [0, 0, 1, 1, 1][: self.size]
                self.random.shuffle(program["cpus"])
        if self.threads:
            program["processes"] = [list(range(self.size))]
            if self.size > 2 and self.chance(0.6):
                cut = self.random.randint(1, self.size - 1)
                ranks = self.random.sample(range(self.size), self.size)
                program["processes"] = [sorted(ranks[:cut]), sorted(ranks[cut:])]
            program["cpus"] = None
            program["environment"].pop("DSCOMM_TOPOLOGY", None)
            program["endings"] = ["destroy"] * self.size
        if self.fault_kind:
            add_fault(self.random, program, self.fault_kind)
        return program


def add_fault(choices: random.Random, program: Program, kind: str) -> None:
    """Adds a fault of this kind if the program has a step for it."""
    rank = choices.randrange(program["size"])
    steps = program["steps"]
    first = next((i for i, step in enumerate(steps) if step["do"] not in FORMING), len(steps))
    if kind in ("kill_at", "stop", "stop_long", "stop_all"):
        after_ms = choices.choice([0.0, 1.0, 2.0, 4.0, 8.0, 15.0]) * choices.uniform(0.5, 2.0)
        fault: Step = {"kind": kind, "rank": rank, "after_ms": round(after_ms, 2)}
        if kind == "stop":
            fault["for_ms"] = choices.choice([5, 30, 100])
        elif kind != "kill_at":
            program["timeout_s"] = SHORT_TIMEOUT_S
            fault["for_ms"] = int(1500 * SHORT_TIMEOUT_S)
        if kind == "stop_all":
            del fault["rank"]
        program["faults"] = [fault]
        return
    own = [step for step in steps[first:] if takes_part(program, step, rank)]
    if kind in ("kill", "exit", "raise"):
        own = [step for step in own if step["do"] not in FORMING]
        if own:
            step = choices.choice(own)
            # Making a group without the dead rank costs its whole timeout: "absent" covers that.
            place = steps.index(step)
            later = {each["group"] for each in steps[place:] if each["do"] in ("group", "world")}
            program["steps"] = steps[:place] + [
                each for each in steps[place:] if each.get("group") not in later
            ]
            program["faults"] = [{"kind": kind, "rank": rank, "before": step["id"]}]
    elif kind == "absent":
        forming = [step for step in steps[1:] if step["do"] in ("group", "world")]
        forming = [step for step in forming if rank in step["ranks"]]
        if forming:
            program["timeout_s"] = SHORT_TIMEOUT_S
            before = choices.choice(forming)["id"]
            program["faults"] = [{"kind": kind, "rank": rank, "before": before}]
    elif kind in ("leave", "abort"):
        groups = sorted({s["group"] for s in own if s["do"] in ("call", "send", "receive")})
        if kind == "leave":  # leaving the world would leave all groups
            groups = [group for group in groups if group.startswith("g")]
        if groups:
            group = choices.choice(groups)
            places = [s for s in own if s.get("group") == group and s["do"] not in FORMING]
            before = choices.choice(places)["id"]
            program["faults"] = [{"kind": kind, "rank": rank, "before": before, "group": group}]
    else:
        calls = [step for step in own if step["do"] == "call"]
        calls = [s for s in calls if len(members(program, s["group"])) > 1 and s["count"] > 0]
        if kind == "change":
            calls = [step for step in calls if changes(program, step)]
        if calls:
            step = choices.choice(calls)
            fault = {"kind": kind, "rank": rank, "before": step["id"]}
            if kind == "change":
                fault["to"] = choices.choice(changes(program, step))
            program["faults"] = [fault]
            program["timeout_s"] = SHORT_TIMEOUT_S


def changes(program: Program, step: Step) -> list[Step]:
    """Ways to change this call that the other ranks can detect."""
    kind = step["call"]
    if kind not in (*COUNT_COMPARED, "gather", "scatter", "barrier", "reduce_scatter_tensor"):
        return []
    if kind == "barrier":
        return [{"call": "all_reduce", "count": 5, "dtype": "float32", "op": "SUM"}]
    ways: list[Step] = [{"dtype": "float32" if step["dtype"] == "int32" else "int32", "op": "SUM"}]
    if kind in COUNT_COMPARED:
        ways.append({"count": step["count"] + 1})
    if kind in ROOTED:
        others = [r for r in members(program, step["group"]) if r != step["root"]]
        ways += [{"root": root} for root in others]
    if kind in ("all_reduce", "reduce") and step["dtype"] in ("int32", "float32"):
        ways.append({"op": "MAX" if step["op"] != "MAX" else "SUM"})
    if kind == "all_reduce":
        ways.append({"call": "broadcast"})
    return ways


def generate(seed: int, slow: bool = False) -> Program:
    return copy.deepcopy(Generator(seed, slow).generate())
