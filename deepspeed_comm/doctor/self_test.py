"""The last check: two ranks on this host communicate over dscomm, and verify the data."""

from __future__ import annotations

import contextlib
import tempfile
import time

from deepspeed_comm.doctor import child
from deepspeed_comm.doctor.examination import Examination
from deepspeed_comm.doctor.report import Finding

RANKS = 2


def check_two_ranks(finding: Finding, examination: Examination) -> None:
    # Half the limit, so that a rank whose peer died raises, with the reason, before it is killed.
    timeout_s = examination.limit_s / 2
    end_s = time.monotonic() + examination.limit_s
    with contextlib.ExitStack() as everything:
        folder = everything.enter_context(tempfile.TemporaryDirectory(prefix="dscomm-doctor-"))
        ranks = [
            everything.enter_context(
                child.Child(
                    child.file("rank.py", folder, str(rank), str(timeout_s)),
                    child.program_environment(),
                )
            )
            for rank in range(RANKS)
        ]
        answers = [rank.answer(end_s - time.monotonic()) for rank in ranks]
    finding.facts.update(
        ranks=RANKS,
        steps=[answer.facts.get("step") for answer in answers],
        imported=any(answer.facts.get("imported", False) for answer in answers),
    )
    failed = False
    for rank, answer in enumerate(answers):
        if answer.facts.get("done") and not answer.ended:
            continue
        failed = True
        step = f"at {answer.facts['step']}" if "step" in answer.facts else "before it began"
        finding.problem(
            f"rank {rank}, {step}: {answer.reason or 'ended too early'}",
            "fix the problems above first; without any, report this with dscomm doctor --json",
        )
    if not failed:
        finding.say(
            f"{RANKS} ranks: all_reduce, broadcast, barrier, send and receive, all values correct"
        )
        if finding.facts["imported"]:
            finding.say("they had to import deepspeed_comm, because torch did not load its plugin")
