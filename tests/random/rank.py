"""One process of a random program: makes the steps of its ranks and reports each as a JSON line.

A line names an action of a rank and its state: begin, started (an asynchronous call), told (the
error raised when leaving the former groups), done with checksums of the results, error, or absent
(its group or call was never made). Each line is one write, so that it outlives the process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from program import COALESCED, Program, Step, actions, members, uses_deepspeed
from values import FACTOR, blank, checksum, moved_input, placed, reduced_input

import deepspeed_comm
from deepspeed_comm import _plugin

_PR_SET_PDEATHSIG = 1


class Raised(Exception):
    """An exception of a rank that its program does not catch."""


class Absent(Exception):
    """An action whose group or call was never made on this rank."""


def object_of(key: int, rank: int, count: int) -> list[int]:
    return [key, rank, *range(count % 50)]


def match_id_of(step: Step) -> str:
    return "-".join(str(step[key]) for key in ("group", "dtype", "op", "count"))


class Rank:
    def __init__(self, program: Program, rank: int, folder: Path) -> None:
        self.program = program
        self.rank = rank
        self.folder = folder
        self.report = os.open(folder / f"report{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.timeout = timedelta(seconds=program["timeout_s"])
        self.groups: dict[str, Any] = {}
        # Asynchronous calls: their Works and the functions that read their results.
        self.works: dict[int, tuple[list[Any], Callable[[], list[list[int]]]]] = {}
        self.dropped: dict[str, dict[int, Callable[[], list[list[int]]]]] = {}
        # Results held when a group was left in an action that then raised an error.
        self.of_left: dict[str, Any] = {}
        self.sabotage = program.get("sabotage") or {}
        self.calls = 0
        self.number = -1  # of the current action
        self.ready = False

    def say(self, number: int, what: str, **facts: Any) -> None:
        line = {"n": number, "what": what, "t": round(time.monotonic(), 4), **facts}
        os.write(self.report, json.dumps(line).encode() + b"\n")

    # --- the run of a rank

    def run(self) -> None:
        for number, action in enumerate(actions(self.program, self.rank)):
            self.number = number
            if action["do"] not in ("world", "group") and not self.ready:
                self.say_ready()
            self.say(number, "begin")
            try:
                values = self.act(action)
            except Absent:
                self.say(number, "absent")
            except Raised:
                raise
            except Exception as error:
                facts = {"dropped": self.of_left} if self.of_left else {}
                kind = type(error).__name__
                self.say(number, "error", kind=kind, text=str(error)[:1200], **facts)
                self.of_left = {}
            else:
                self.say(number, "started" if values is None else "done", values=values)
        self.say_ready()
        self.end(self.program["endings"][self.rank])

    def say_ready(self) -> None:
        if not self.ready:
            self.ready = True
            (self.folder / f"ready{self.rank}").touch()

    def end(self, how: str) -> None:
        if how == "destroy":
            self.number = -1
            self.say(-1, "begin")
            try:
                self.leave_world()
                values = {name: self.read_dropped(name) for name in list(self.dropped)}
                self.say(-1, "done", dropped=values, left=self.mappings())
            except Exception as error:
                self.say(-1, "error", kind=type(error).__name__, text=str(error)[:1200])

    def mappings(self) -> int:
        if len(self.program["processes"]) < self.program["size"]:
            return 0
        lines = Path("/proc/self/maps").read_text().splitlines()
        return len({line.split()[4] for line in lines if "/memfd:dscomm-" in line})

    def read_dropped(self, name: str) -> dict[int, list[list[int]]]:
        return {key: read() for key, read in self.dropped.pop(name, {}).items()}

    # --- actions

    def act(self, action: Step) -> Any:
        return getattr(self, "do_" + action["do"])(action)

    def group(self, action: Step) -> Any:
        if action["group"] not in self.groups:
            raise Absent
        return self.groups[action["group"]]

    def do_world(self, action: Step) -> list[Any]:
        if dist.is_initialized():
            self.leave_world()
            self.of_left = {name: self.read_dropped(name) for name in list(self.dropped)}
        self.groups.clear()
        size = self.program["size"]
        store = dist.FileStore(str(self.folder / action["group"]), size)
        dist.init_process_group(
            "dscomm", store=store, rank=self.rank, world_size=size, timeout=self.timeout
        )
        if uses_deepspeed(self.program):
            deepspeed_comm.init_distributed(verbose=False)
        self.groups[action["group"]] = dist.distributed_c10d._get_default_group()
        values, self.of_left = [self.of_left], {}
        return values

    def leave_world(self) -> None:
        """Leaves all groups. If one raises, the others stay until the next attempt."""
        while dist.is_initialized():
            try:
                dist.destroy_process_group()
            except Exception as error:
                self.say(self.number, "told", text=f"{type(error).__name__}: {error}"[:1200])

    def do_group(self, action: Step) -> list[Any]:
        if not dist.is_initialized():
            raise Absent  # its world could not be made
        group = dist.new_group(action["ranks"], timeout=self.timeout)
        if self.rank in action["ranks"]:
            self.groups[action["group"]] = group
        return []

    def do_destroy(self, action: Step) -> list[Any]:
        group = self.group(action)
        del self.groups[action["group"]]
        try:
            dist.destroy_process_group(group)
        finally:
            self.of_left = {action["group"]: self.read_dropped(action["group"])}
        values, self.of_left = [self.of_left], {}
        return values

    do_leave = do_destroy

    def do_abort(self, action: Step) -> list[Any]:
        self.group(action).abort()
        return []

    def do_sleep(self, action: Step) -> list[Any]:
        time.sleep(action["ms"] / 1000)
        return []

    def do_kill(self, action: Step) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)

    def do_exit(self, action: Step) -> None:
        os._exit(0)

    def do_raise(self, action: Step) -> None:
        raise Raised("the program of this rank raises here")

    def do_wait(self, action: Step) -> list[list[int]]:
        if action["of"] not in self.works:
            raise Absent
        works, read = self.works.pop(action["of"])
        for work in works:
            if isinstance(work, torch._C.Future):  # from all_reduce_coalesced
                work.wait()
                continue
            if action["by"] == "poll":
                while not work.is_completed():
                    time.sleep(0.0003)
            if action["by"] == "future":
                work.get_future().wait()
            else:
                work.wait()
        return read()

    def do_send(self, action: Step) -> Any:
        group = self.group(action)
        values = moved_input(action["dtype"], action["count"], (action["id"], 0))
        tensor = placed(values, action["layout"], group)
        if action["how"] == "sync":
            api: Any = deepspeed_comm if action.get("is_direct") else dist
            api.send(tensor, action["peer"], group=group, tag=action["tag"])
            return []
        work = dist.isend(tensor, action["peer"], group=group, tag=action["tag"])
        self.works[action["id"]] = ([work], list)
        return None

    def do_receive(self, action: Step) -> Any:
        group = self.group(action)
        tensor = blank(action["dtype"], action["count"], action["layout"], group)
        if action["how"] == "sync":
            api: Any = deepspeed_comm if action.get("is_direct") else dist
            source = api.recv(tensor, action["peer"], group=group, tag=action["tag"])
            return [[source, *checksum(tensor)]]
        work = dist.irecv(tensor, action["peer"], group=group, tag=action["tag"])

        ranks = members(self.program, action["group"])

        def read() -> list[list[int]]:
            return [[ranks[work._source_rank()], *checksum(tensor)]]

        self.works[action["id"]] = ([work], read)
        return None

    def do_batch(self, action: Step) -> list[list[int]]:
        group = self.group(action)
        own = [part for part in action["parts"] if part["rank"] == self.rank]
        operations, tensors = [], []
        for part in own:
            if part["do"] == "send":
                values = moved_input(part["dtype"], part["count"], (part["id"], 0))
                tensors.append(placed(values, part["layout"], group))
                function = dist.isend
            else:
                tensors.append(blank(part["dtype"], part["count"], part["layout"], group))
                function = dist.irecv
            operations.append(dist.P2POp(function, tensors[-1], part["peer"], group, part["tag"]))
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return [
            [part["peer"], *checksum(tensor)]
            for part, tensor in zip(own, tensors, strict=True)
            if part["do"] == "receive"
        ]

    def do_call(self, action: Step) -> Any:
        self.calls += 1
        index = members(self.program, action["group"]).index(self.rank)
        how = action["how"][index]
        group = self.group(action)
        call = Call(self, action, group, index)
        if self.sabotage.get("rank") == self.rank and self.calls == self.sabotage["call"]:
            if self.sabotage["how"] == "drop":
                return call.read()
            if self.sabotage["how"] == "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            if self.sabotage["how"] == "hang":
                time.sleep(3600)
        work = call.make(how != "sync")
        if self.sabotage.get("rank") == self.rank and self.calls == self.sabotage["call"]:
            if self.sabotage["how"] == "wrong":
                for tensor in call.outputs:
                    tensor.zero_()
        if how == "sync":
            return call.read()
        if how == "async":
            self.works[action["id"]] = ([work], call.read)
        else:
            call.inputs.clear()
            self.dropped.setdefault(action["group"], {})[action["id"]] = call.read
        return None


class Call:
    """One collective of one rank: its tensors, the call, and its results."""

    def __init__(self, rank: Rank, step: Step, group: Any, index: int) -> None:
        self.rank, self.step, self.group, self.index = rank, step, group, index
        self.size = len(members(rank.program, step["group"]))
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.objects: list[Any] | None = None

    def source(self, part: int = 0, count: int | None = None, reduced: bool = False) -> Any:
        """A part of this rank's input, in the layout of its inputs."""
        step, key = self.step, (self.step["id"], self.rank.rank, part)
        count = step["count"] if count is None else count
        if reduced:
            values = reduced_input(step["dtype"], step["op"], count, key)
        else:
            values = moved_input(step["dtype"], count, key)
        self.inputs.append(placed(values, step["layouts"][self.index][0], self.group))
        return self.inputs[-1]

    def target(self, count: int) -> torch.Tensor:
        layout = self.step["layouts"][self.index][1]
        self.outputs.append(blank(self.step["dtype"], count, layout, self.group))
        return self.outputs[-1]

    def in_place(self, tensor: torch.Tensor) -> torch.Tensor:
        self.outputs.append(tensor)
        return tensor

    def operator(self) -> Any:
        if self.step["op"] == "PREMUL_SUM":
            return dist._make_nccl_premul_sum(FACTOR)  # type: ignore[attr-defined]
        return getattr(dist.ReduceOp, self.step["op"])

    def splits(self) -> list[list[int]]:
        even = [[self.step["count"]] * self.size] * self.size
        splits: list[list[int]] = self.step.get("splits", even)
        return splits

    def read(self) -> list[list[int]]:
        if self.objects is not None:
            return self.objects
        return [checksum(tensor) for tensor in self.outputs]

    def make(self, asynchronous: bool) -> Any:
        step, group, size = self.step, self.group, self.size
        kind, count, root = step["call"], step["count"], step["root"]
        is_root = root == self.rank.rank
        more: dict[str, Any] = {"group": group, "async_op": asynchronous}
        if kind == "barrier":
            return dist.barrier(**more)
        if kind == "monitored_barrier":
            return group.monitored_barrier(self.rank.timeout)
        if kind == "all_reduce":
            return dist.all_reduce(
                self.in_place(self.source(0, reduced=True)), self.operator(), **more
            )
        if kind == "inference_all_reduce":
            tensor = self.in_place(self.source(0, reduced=True))
            result = deepspeed_comm.inference_all_reduce(tensor, self.operator(), group=group)
            return result
        if kind == "all_reduce_caching":
            tensor = self.in_place(self.source(0, reduced=True))
            return deepspeed_comm.all_reduce_caching(
                tensor, self.operator(), match_id_of(step), group=group
            )
        if kind == "reduce":
            tensor = self.in_place(self.source(0, reduced=True))
            return dist.reduce(tensor, root, self.operator(), **more)
        if kind == "broadcast":
            tensor = self.source() if is_root else self.target(count)
            if is_root:
                self.in_place(tensor)
            return dist.broadcast(tensor, root, **more)
        if kind == "all_gather":
            counts = [row[0] for row in self.splits()]
            outputs = [self.target(each) for each in counts]
            return dist.all_gather(outputs, self.source(0, counts[self.index]), **more)
        if kind == "all_gather_into_tensor":
            return dist.all_gather_into_tensor(self.target(count * size), self.source(), **more)
        if kind == "gather":
            outputs = [self.target(count) for _ in range(size)] if is_root else None
            return dist.gather(self.source(), outputs, root, **more)
        if kind == "scatter":
            sources = [self.source(part) for part in range(size)] if is_root else None
            return dist.scatter(self.target(count), sources, root, **more)
        if kind == "reduce_scatter":
            counts = [row[0] for row in self.splits()]
            sources = [self.source(k, each, reduced=True) for k, each in enumerate(counts)]
            target = self.target(counts[self.index])
            return dist.reduce_scatter(target, sources, self.operator(), **more)
        if kind == "reduce_scatter_tensor":
            source = self.source(0, count * size, reduced=True)
            return dist.reduce_scatter_tensor(self.target(count), source, self.operator(), **more)
        if kind == "all_to_all":
            sources = [self.source(k, each) for k, each in enumerate(self.splits()[self.index])]
            outputs = [self.target(row[self.index]) for row in self.splits()]
            return dist.all_to_all(outputs, sources, **more)
        if kind == "all_to_all_single":
            sends = self.splits()[self.index]
            receives = [row[self.index] for row in self.splits()]
            source, target = self.source(0, sum(sends)), self.target(sum(receives))
            return dist.all_to_all_single(target, source, receives, sends, **more)
        if kind in COALESCED:
            return self.make_coalesced(asynchronous)
        if kind == "all_gather_object":
            found: list[Any] = [None] * size
            dist.all_gather_object(found, object_of(step["id"], self.rank.rank, count), group)
            self.objects = found
        if kind == "broadcast_object":
            found = [object_of(step["id"], root, count) if is_root else None]
            dist.broadcast_object_list(found, root, group)
            self.objects = found
        if kind == "gather_object":
            found = [None] * size if is_root else []
            mine = object_of(step["id"], self.rank.rank, count)
            dist.gather_object(mine, found if is_root else None, root, group)
            self.objects = found
        if kind == "scatter_object":
            ranks = members(self.rank.program, step["group"])
            sources = [object_of(step["id"], each, count) for each in ranks] if is_root else None
            found = [None]
            dist.scatter_object_list(found, sources, root, group)
            self.objects = found
        return None

    def make_coalesced(self, asynchronous: bool) -> Any:
        step, group = self.step, self.group
        counts = step["counts"]
        if step["call"] in ("manager_all_gather", "all_gather_coalesced"):
            sources = [self.source(k, count) for k, count in enumerate(counts)]
            targets = [self.target(count * self.size) for count in counts]
            if step["call"] == "all_gather_coalesced":
                deepspeed_comm.all_gather_coalesced(targets, sources, group)
                return None
            with dist._coalescing_manager(group=group):
                for source, target in zip(sources, targets, strict=True):
                    dist.all_gather_into_tensor(target, source, group=group)
            return None
        if step["call"] == "manager_reduce_scatter":
            sources = [
                self.source(k, count * self.size, reduced=True) for k, count in enumerate(counts)
            ]
            targets = [self.target(count) for count in counts]
            with dist._coalescing_manager(group=group):
                for source, target in zip(sources, targets, strict=True):
                    dist.reduce_scatter_tensor(target, source, self.operator(), group=group)
            return None
        tensors = [
            self.in_place(self.source(k, count, reduced=True)) for k, count in enumerate(counts)
        ]
        if step["call"] == "all_reduce_coalesced":
            return dist.all_reduce_coalesced(tensors, self.operator(), group, asynchronous)
        with dist._coalescing_manager(group=group):
            for tensor in tensors:
                dist.all_reduce(tensor, self.operator(), group=group)
        return None


# --- the process


def serve(program: Program, ranks: list[int], folder: Path, parent: int) -> None:
    """Runs a forked process. Never returns."""
    code = 70
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(70)
        os.setsid()
        # A new session is a new scheduler group, in which the niceness would have no effect.
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text(str(os.nice(0)))
        output = os.open(folder / f"output{ranks[0]}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        sys.stdout = open(1, "w", buffering=1, closefd=False)
        sys.stderr = open(2, "w", buffering=1, closefd=False)
        faulthandler.enable(open(folder / f"stack{ranks[0]}", "w"), all_threads=True)
        faulthandler.register(signal.SIGUSR1, open(folder / f"stack{ranks[0]}", "a"))
        os.environ.update(program["environment"])
        if program["cpus"] is not None:
            os.sched_setaffinity(0, {program["cpus"][ranks[0]]})
        code = (
            _threads(program, ranks, folder)
            if len(ranks) > 1
            else _alone(program, ranks[0], folder)
        )
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _end_interpreter() -> None:
    """Does the parts of a Python program's end that others can observe."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # The interpreter clears its modules.
    vars(_plugin.load_extension()).pop("_at_end")


def _alone(program: Program, number: int, folder: Path) -> int:
    rank = Rank(program, number, folder)
    try:
        rank.run()
    except Raised as error:
        sys.excepthook(Raised, error, error.__traceback__)
        _end_interpreter()
        return 1
    # Between hosts, a process that ends without groups and without leaving the transport is taken
    # for dead while others still make a group in which it was.
    if program["endings"][number] == "return" or "hosts" in program:
        _end_interpreter()
    return 0


def _threads(program: Program, ranks: list[int], folder: Path) -> int:
    from torch.testing._internal.distributed.multi_threaded_pg import _install_threaded_pg

    torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
    _install_threaded_pg()
    # After a fork the first user of torch's thread pool replaces it; another thread that asks at
    # that moment gets none (caffe2::pthreadpool()).
    torch.set_num_threads(1)
    failed: list[int] = []

    def run(number: int) -> None:
        try:
            Rank(program, number, folder).run()
        except BaseException:
            traceback.print_exc()
            failed.append(number)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 71 if failed else 0
