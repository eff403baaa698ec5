"""`dscomm bench`: times collectives on the ranks of a launcher; without one, on one rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist

from deepspeed_comm import _launcher_variables, comm
from deepspeed_comm.bench import report
from deepspeed_comm.bench.flags import Options, launched_as, parse
from deepspeed_comm.bench.ledger import Ledger
from deepspeed_comm.bench.measurement import (
    COPY_BYTES,
    Measurement,
    Refusal,
    Row,
    compared,
    copy_rate,
    groups_of,
)
from deepspeed_comm.bench.plan import settings


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status, the same on all ranks."""
    rank, world = launched_as()
    options = parse(arguments, rank, world)
    comm.init_distributed(options.backends[0], verbose=False)
    local_ranks = _launcher_variables.local_world_size(os.environ, dist.get_world_size())
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))
    try:
        status = run(options)
        dist.barrier()  # rank 0 may serve the store, which other ranks still read
        return status
    finally:
        dist.destroy_process_group()


def run(options: Options, kind: type[Measurement] = Measurement) -> int:
    """Measures over the default group; returns the exit status, the same on all ranks."""
    ledger = Ledger()
    planned = settings(options, ledger.world)
    steps = sum(len(each.sizes(options, ledger.world)) for each in planned)
    mistake = ledger.agree(_mistake(options, ledger, steps))
    if mistake is not None:
        if ledger.rank == 0:
            print(f"bench: {mistake}", file=sys.stderr, flush=True)
        return 2
    measurement = kind(options, groups_of(options.backends), ledger)
    found: list[Row | Refusal] = []
    first, has_others = options.backends[0], len(options.backends) + options.direct > 1
    before = copy_rate(ledger)
    with report.progress(ledger.rank, steps) as (step_done, tell):
        tell(report.introduction(options, ledger.world))
        named = ""
        for setting in planned:
            if setting.collective != named:
                named = setting.collective
                tell(f"#\n# {named}\n{report.heading(first if has_others else '')}")
            for rows in measurement.rows(setting):
                own = [row for row in rows if isinstance(row, Row)]
                ratios = {row.backend: ratio for row, ratio in compared(own, first)}
                for row in rows:
                    tell(report.line_of(row, ratios.get(row.backend)))
                found += rows
                step_done()
        after = copy_rate(ledger)
        tell(
            f"#\n# copy rate of the slowest rank, {COPY_BYTES >> 20} MiB, all ranks at once: "
            f"{before:.1f} GB/s before, {after:.1f} GB/s after"
        )
        status = _conclude(options, ledger, found, (before, after), tell)
    return int(ledger.agree(status))


def _mistake(options: Options, ledger: Ledger, steps: int) -> str | None:
    """A mistake in flags that depends on the number of ranks, or None; rank 0's answer counts."""
    if options.root is not None and options.root >= ledger.world:
        return f"-r/--root: rank {options.root} must be below {ledger.world}, the number of ranks"
    if steps == 0:
        return "no size has an element for every rank: raise -e/--maxbytes"
    return report.why_not_writable(options) if ledger.rank == 0 else None


def _conclude(
    options: Options,
    ledger: Ledger,
    found: list[Row | Refusal],
    copies: tuple[float, float],
    tell: report.Tell,
) -> int:
    """Prints the footer and writes the files; returns the exit status, which counts on rank 0."""
    if ledger.rank != 0:
        return 0
    rows = [each for each in found if isinstance(each, Row)]
    wrong = sum(row.wrong or 0 for row in rows)
    for line in report.footer(rows, options.backends[0]) if rows else ["# nothing was measured"]:
        tell(line)
    if rows and options.check:
        tell(f"# wrong elements: {wrong} {'FAILED' if wrong else 'OK'}")
    elif rows:
        tell("# no result was checked (-c 0)")
    try:
        report.write_files(options, ledger.world, found, copies)
    except OSError as error:
        tell(f"# a file could not be written: {error}")
        return 1
    return 1 if wrong or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
