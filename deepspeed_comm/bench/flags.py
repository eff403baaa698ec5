"""The command line, with nccl-tests' flags where it has them.

All ranks parse the same line, so all end at a wrong flag; only rank 0 prints the error.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from deepspeed_comm import _launcher_variables
from deepspeed_comm.bench.collectives import COLLECTIVES, DIRECT

# By the names of nccl-tests; old torch lacks some.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("int8", "uint8", "int32", "uint32", "int64", "uint64", "half", "float", "double"),
        "bfloat16",
    )
    if hasattr(torch, name)
}
_OTHER_NAMES = {"float16": "half", "float32": "float", "float64": "double"}
OPS = ("sum", "prod", "min", "max", "avg")
MOST_SIZES = 10_000


@dataclasses.dataclass
class Options:
    """The parsed flags. Sizes are in bytes; root None: each rank in turn; check: verify results."""

    collectives: list[str]
    backends: list[str]
    sizes: list[int]
    dtypes: list[str]
    ops: list[str]
    root: int | None
    iters: int
    warmup_iters: int
    agg_iters: int
    check: bool
    touch: bool
    direct: bool
    json: Path | None
    csv: Path | None
    plot: Path | None


def launched_as() -> tuple[int, int | None]:
    """The rank and the number of ranks (None if unknown), also before there is a group."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return _launcher_variables.find_rank(os.environ)


class _Parser(argparse.ArgumentParser):
    """A parser that prints only on rank 0."""

    prints = True

    def _print_message(self, message: str, file: object = None) -> None:
        if self.prints:
            super()._print_message(message, file)  # type: ignore[arg-type]

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"bench: {message} (--help lists the flags)\n")


def byte_size(text: str) -> int:
    """Parses bytes such as 8, 64K, 16M or 1G."""
    found = re.fullmatch(r"(\d+)([KMG]?)", text, re.IGNORECASE)
    size = int(found[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[found[2].upper()] if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"expected bytes such as 8, 64K, 16M or 1G, got {text!r}")
    return size


def whole(least: int, text: str) -> int:
    """Parses a whole number of at least `least`."""
    if not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number from {least} on, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """Parses a whole number above 0."""
    return whole(1, text)


def _root(text: str) -> int | None:
    return None if text == "all" else whole(0, text)


def _dtypes(text: str) -> list[str]:
    if text == "all":
        return list(DTYPES)
    name = _OTHER_NAMES.get(text, text)
    if name not in DTYPES:
        raise argparse.ArgumentTypeError(f"expected all or one of {', '.join(DTYPES)}: {text!r}")
    return [name]


def _parser() -> _Parser:
    parser = _Parser(
        prog="dscomm bench",
        description="Time collectives of torch.distributed on CPU tensors; check every result.",
        epilog="Exit status: 0; 1 for a wrong result, or if nothing could be measured; 2 for a "
        "wrong flag.",
    )
    add = parser.add_argument
    add("collectives", nargs="*", metavar="COLLECTIVE",
        help=f"all or any of {', '.join(COLLECTIVES)} (default: all_reduce)")  # fmt: skip
    add("-b", "--minbytes", type=byte_size, default=8, help="smallest size (default: 8)")
    add("-e", "--maxbytes", type=byte_size, help="largest size (default: 16M, or the smallest)")
    steps = parser.add_mutually_exclusive_group()
    steps.add_argument("-i", "--stepbytes", type=byte_size, help="increment between sizes")
    steps.add_argument("-f", "--stepfactor", type=lambda text: whole(2, text),
                       help="factor between sizes (default: 2)")  # fmt: skip
    add("-n", "--iters", type=positive, default=100, help="timed samples (default: 100)")
    add("-w", "--warmup_iters", type=lambda text: whole(0, text), default=5,
        help="calls before the samples (default: 5)")  # fmt: skip
    add("-m", "--agg_iters", type=positive, default=1,
        help="calls per sample, whose time is their mean (default: 1)")  # fmt: skip
    add("-c", "--check", type=lambda text: whole(0, text), default=1,
        help="0 does not check results (default: 1)")  # fmt: skip
    add("-o", "--op", choices=(*OPS, "all"), default="sum", help="reduction (default: sum)")
    add("-d", "--datatype", type=_dtypes, default="float",
        help=f"all or one of {', '.join(DTYPES)} (default: float)")  # fmt: skip
    add("-r", "--root", type=_root, default=0, help="a rank, or all (default: 0)")
    add("--backend", nargs="+", default=["dscomm"], metavar="NAME",
        help="backends to measure, interleaved (default: dscomm)")  # fmt: skip
    add("--touch", action="store_true",
        help="rewrite the tensors, then synchronize the ranks, before each timed call")  # fmt: skip
    add("--direct", action="store_true",
        help="also measure deepspeed_comm's direct calls of all_reduce and ping_pong")  # fmt: skip
    for name, what in (("json", "rows and settings"), ("csv", "rows"), ("plot", "a PNG figure")):
        add(f"--{name}", type=Path, metavar="FILE", help=f"the file for {what}, written by rank 0")
    return parser


def parse(arguments: Sequence[str] | None, rank: int, world: int | None) -> Options:
    """Parses the flags. Exits with status 2 for a wrong flag; rank 0 prints the error."""
    parser = _parser()
    parser.prints = rank == 0
    given = parser.parse_args(arguments)
    collectives = list(dict.fromkeys(given.collectives)) or ["all_reduce"]
    if "all" in collectives:
        collectives = list(COLLECTIVES)
    for name in collectives:
        if name not in COLLECTIVES:
            parser.error(f"no collective {name!r}: expected all, {', '.join(COLLECTIVES)}")
    backends = list(dict.fromkeys(name.lower() for name in given.backend))
    for name in backends:
        if name in COLLECTIVES or name == "all":
            parser.error(f"--backend takes all names after it: put {name} before --backend")
        if not hasattr(dist.Backend, name.upper()) or name == "undefined":
            parser.error(f"torch knows no backend {name!r}")
        if not getattr(dist, f"is_{name}_available", lambda: True)():
            parser.error(f"this torch was built without the backend {name!r}")
    if given.direct and not (set(DIRECT) & set(collectives) and "dscomm" in backends):
        parser.error(f"--direct needs {' or '.join(DIRECT)}, and dscomm in --backend")
    if given.touch and given.agg_iters > 1:
        parser.error("--touch rewrites the tensors before each timed call: use it only with -m 1")
    if given.root is not None and world is not None and given.root >= world:
        parser.error(f"-r/--root: rank {given.root} must be below {world}, the number of ranks")
    ops = list(OPS) if given.op == "all" else [given.op]
    if not any(has_meaning(op, dtype) for op in ops for dtype in given.datatype):
        parser.error(f"-o {given.op} of {given.datatype[0]} has no meaning")
    return Options(
        collectives, backends, _sizes(parser, given), given.datatype, ops, given.root,
        given.iters, given.warmup_iters, given.agg_iters, given.check > 0, given.touch,
        given.direct, given.json, given.csv, given.plot,
    )  # fmt: skip


def _sizes(parser: _Parser, given: argparse.Namespace) -> list[int]:
    last = max(given.minbytes, 16 << 20) if given.maxbytes is None else given.maxbytes
    if last < given.minbytes:
        parser.error(f"-b/--minbytes {given.minbytes} is above -e/--maxbytes {last}")
    sizes = [given.minbytes]
    while len(sizes) <= MOST_SIZES:
        size = sizes[-1]
        size = size + given.stepbytes if given.stepbytes else size * (given.stepfactor or 2)
        if size > last:
            return sizes
        sizes.append(size)
    parser.error(f"more than {MOST_SIZES} sizes: take larger steps")


def has_meaning(op: str, dtype: str) -> bool:
    """Whether `dtype` supports `op`: a mean of integers is not an integer."""
    return op != "avg" or DTYPES[dtype].is_floating_point
