"""Where dscomm is not expected to do as gloo does, each with its reason.

Only what torch decides by the name of the backend belongs here. An entry that no longer comes true
is reported as unexpected.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Failure:
    message: str  # A regular expression found in what the ranks raised.
    reason: str


_MONITORED_BARRIER = Failure(
    message="monitored_barrier is only implemented for GLOO backend",
    reason="torch.distributed.monitored_barrier asks for the name gloo before anything else",
)

# Tests that gloo passes and dscomm fails.
FAILURES: dict[str, Failure] = {
    "test_ddp_logging_data_cpu": Failure(
        message="'custom' != 'dscomm'",
        reason="DDP logs the type of a backend, and every one outside of torch is 'custom'",
    ),
    "test_monitored_barrier_failure_order": _MONITORED_BARRIER,
    "test_monitored_barrier_gloo": _MONITORED_BARRIER,
    "test_monitored_barrier_gloo_subgroup": _MONITORED_BARRIER,
    "test_monitored_barrier_wait_all_ranks": _MONITORED_BARRIER,
}

# These are run a second time with that one question answered "gloo", so that all but the name is
# held against gloo nevertheless. The group itself remains dscomm's.
NAME_CHECK_ANSWERED = [name for name, why in FAILURES.items() if why is _MONITORED_BARRIER]
