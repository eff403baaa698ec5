"""MPI's own collectives and messages, over all ranks and without dscomm, through ctypes.

Open MPI's handles are addresses of variables, MPICH's are the numbers of its mpi.h. The calls are
blocking, of contiguous float32 tensors, and reduce with SUM.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.hosts.version import version_of

_OPEN_MPI, _MPICH = "libmpi.so.40", "libmpi.so.12"


class FlatMpi:
    """MPI_COMM_WORLD, in a process that has initialised Open MPI or MPICH."""

    def __init__(self) -> None:
        self._mpi, name = _loaded_library()
        # _ignore is both MPI_STATUS_IGNORE and MPI_STATUSES_IGNORE.
        self._world: Any
        self._float: Any
        self._sum: Any
        self._request: type[ctypes.c_int] | type[ctypes.c_void_p]
        if name == _MPICH:
            handles = (0x44000000, 0x4C00040A, 0x58000003)
            self._world, self._float, self._sum = map(ctypes.c_int, handles)
            self._ignore, self._request = ctypes.c_void_p(1), ctypes.c_int
        else:
            self._world, self._float, self._sum = (
                ctypes.byref(ctypes.c_char.in_dll(self._mpi, f"ompi_mpi_{name}"))
                for name in ("comm_world", "float", "op_sum")
            )
            self._ignore, self._request = ctypes.c_void_p(0), ctypes.c_void_p
        self.version = version_of(self._mpi)
        self.rank = self._number("MPI_Comm_rank")
        self.size = self._number("MPI_Comm_size")

    def make_call(
        self, name: str, given: torch.Tensor, result: torch.Tensor, part: int, root: int
    ) -> Callable[[], object]:
        """A call of deepspeed_comm.bench.collectives, on tensors made of parts of `part` elements.

        The call raises RuntimeError if MPI refuses.
        """
        data, out = ctypes.c_void_p(given.data_ptr()), ctypes.c_void_p(result.data_ptr())
        world, kind, me = self._world, self._float, self.rank
        after, before = (me + 1) % self.size, (me - 1) % self.size
        call = self._call
        if name in ("all_reduce", "reduce"):
            return self._reduction(name, given, root)
        if name == "all_gather":
            return call("MPI_Allgather", data, part, kind, out, part, kind, world)
        if name == "reduce_scatter":
            return call("MPI_Reduce_scatter_block", data, out, part, kind, self._sum, world)
        if name == "broadcast":
            return call("MPI_Bcast", data, part, kind, root, world)
        if name == "gather":
            return call("MPI_Gather", data, part, kind, out, part, kind, root, world)
        if name == "scatter":
            return call("MPI_Scatter", data, part, kind, out, part, kind, root, world)
        if name == "all_to_all":
            return call("MPI_Alltoall", data, part, kind, out, part, kind, world)
        if name == "barrier":
            return call("MPI_Barrier", world)
        if name == "send_recv":
            return self._swap(data, after, out, before, part)
        if name == "ping_pong":
            return self._ping_pong(data, out, part) if result.numel() else lambda: None
        if name == "exchange":
            return self._exchange(given, result, part, after, before)
        raise ValueError(f"no collective is called {name!r}")

    def _number(self, name: str) -> int:
        number = ctypes.c_int()
        self._call(name, self._world, ctypes.byref(number))()
        return number.value

    def _call(self, name: str, *arguments: Any) -> Callable[[], None]:
        function = getattr(self._mpi, name)

        def call() -> None:
            if function(*arguments) != 0:
                raise RuntimeError(f"{name} failed")

        return call

    def _reduction(self, name: str, tensor: torch.Tensor, root: int) -> Callable[[], None]:
        """In place for the caller. MPI receives into a second buffer: with one buffer for both,
        Open MPI does not use its algorithms for long messages. So the tensor's memory changes."""
        spare = torch.empty_like(tensor)
        receives = name == "all_reduce" or root == self.rank
        last = [] if name == "all_reduce" else [root]

        def call() -> None:
            data, out = (ctypes.c_void_p(t.data_ptr()) for t in (tensor, spare))
            function = self._mpi.MPI_Reduce if last else self._mpi.MPI_Allreduce
            if function(data, out, tensor.numel(), self._float, self._sum, *last, self._world) != 0:
                raise RuntimeError(f"MPI's {name} failed")
            if receives:
                result = spare.detach()
                spare.set_(tensor.detach())
                tensor.set_(result)

        return call

    def _swap(
        self, data: Any, to: int, out: Any, source: int, count: int, tag: int = 0
    ) -> Callable[[], None]:
        kind = self._float
        sent, received = (data, count, kind, to, tag), (out, count, kind, source, tag)
        return self._call("MPI_Sendrecv", *sent, *received, self._world, self._ignore)

    def _ping_pong(self, data: Any, out: Any, count: int) -> Callable[[], None]:
        """Even ranks send to the next rank, which sends the data back."""
        is_even = self.rank % 2 == 0
        peer = self.rank + 1 if is_even else self.rank - 1
        place = (count, self._float, peer, 0, self._world)
        send = self._call("MPI_Send", data if is_even else out, *place)
        receive = self._call("MPI_Recv", out, *place, self._ignore)
        steps = (send, receive) if is_even else (receive, send)

        def call() -> None:
            for step in steps:
                step()

        return call

    def _exchange(
        self, given: torch.Tensor, result: torch.Tensor, count: int, after: int, before: int
    ) -> Callable[[], None]:
        """Sends one half to the next rank, the other half to the previous rank."""
        requests = (self._request * 4)()
        sent, received = given.chunk(2), result.chunk(2)
        calls = []
        for number, (name, tensor, peer, tag) in enumerate((
            ("MPI_Irecv", received[0], before, 0),
            ("MPI_Irecv", received[1], after, 1),
            ("MPI_Isend", sent[0], after, 0),
            ("MPI_Isend", sent[1], before, 1),
        )):  # fmt: skip
            data = ctypes.c_void_p(tensor.data_ptr())
            request = ctypes.byref(requests, number * ctypes.sizeof(self._request))
            place = (count, self._float, peer, tag, self._world)
            calls.append(self._call(name, data, *place, request))
        calls.append(self._call("MPI_Waitall", 4, requests, self._ignore))

        def call() -> None:
            for step in calls:
                step()

        return call


def _loaded_library() -> tuple[ctypes.CDLL, str]:
    for name in (_OPEN_MPI, _MPICH):
        try:
            return ctypes.CDLL(name, os.RTLD_NOW | os.RTLD_NOLOAD), name
        except OSError:
            continue
    raise RuntimeError("this process has loaded neither Open MPI nor MPICH")
