"""`dscomm doctor`: runs the checks and prints their findings."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys

import deepspeed_comm
from deepspeed_comm._launcher_variables import spans_hosts
from deepspeed_comm.doctor.checks import examine
from deepspeed_comm.doctor.report import (
    Finding,
    Outcome,
    as_json,
    printer,
    status_of,
    summary,
    worst,
)


def main() -> int:
    options = parse_options()
    for number in (signal.SIGTERM, signal.SIGHUP):  # ends the child processes, too
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    show = (lambda finding: None) if options.json else printer()
    findings: list[Finding] = []
    hosts = options.hosts or spans_hosts(os.environ)
    for finding in examine(options.limit, hosts=hosts):
        findings.append(finding)
        show(finding)
    if options.json:
        about = {"deepspeed_comm": deepspeed_comm.__version__, "host": platform.node()}
        print(json.dumps(as_json(findings, about), indent=2))
    else:
        print(f"\n{platform.node()}: {summary(findings)}")
    return 1 if worst(findings) is Outcome.PROBLEM else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dscomm doctor",
        description="Check this host for faults that keep dscomm from working.",
        epilog="Exit status: 0 without a problem, 1 with one, 2 for a wrong option.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.add_argument(
        "--hosts",
        action="store_true",
        help="the job spans hosts, so a fault of MPI is a problem, not a warning; the default if a "
        "launcher says so",
    )
    parser.add_argument(
        "--limit",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="time limit of each check that runs a process (default: 60)",
    )
    return parser.parse_args()


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 3600:
        raise argparse.ArgumentTypeError(f"got {text}, expected seconds above 0, up to 3600")
    return value


if __name__ == "__main__":
    sys.exit(status_of(main))
