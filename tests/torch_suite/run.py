"""Runs PyTorch's DistributedTest on CPU tensors and holds the outcomes against gloo's.

  python -m tests.torch_suite.run --backend dscomm --ranks 4 [--only PATTERN] [--subset] [--json F]

An outcome is unexpected when a test that gloo passes does not pass, when one fails that gloo skips,
and when a listed exception does not come true; the exit status tells whether there was one. The
baseline is made with gloo:

  python -m tests.torch_suite.run --backend gloo --ranks 2 --write-baseline
  python -m tests.torch_suite.run --backend gloo --ranks 4 --write-baseline
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import re
import signal
import sys
import textwrap
from typing import NoReturn

from tests.torch_suite import exceptions, forked_ranks
from tests.torch_suite import suite as torch_suite
from tests.torch_suite.forked_ranks import Outcome

BASELINE = pathlib.Path(__file__).with_name("gloo_baseline.json")
# Several times what the slowest test takes on two busy cores, and more than the groups' timeout of
# 60 s, at which a rank that waits for ever gives up by itself and says for whom it waited.
_LIMIT_S = 240.0


def main() -> int:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, _leave)
    suite = torch_suite.load(arguments.backend, arguments.ranks)
    baseline = {} if arguments.write_baseline else _read_baseline(arguments.ranks)

    outcomes: dict[str, Outcome] = {}
    unexpected: dict[str, str] = {}
    for name in _choose(torch_suite.test_names(suite), arguments, baseline):
        for answered in _variants(name, arguments.backend):
            title = f"{name} (name check answered)" if answered else name
            outcome = forked_ranks.run(
                suite, name, arguments.backend, arguments.ranks, arguments.limit_s, answered
            )
            outcomes[title] = outcome
            dscomm = arguments.backend == "dscomm"
            listed = exceptions.FAILURES.get(name) if dscomm and not answered else None
            surprise = ""
            if not arguments.write_baseline:
                surprise = _surprise(outcome, baseline.get(name), listed)
            if surprise:
                unexpected[title] = surprise
            _print_test(title, outcome, surprise, listed)

    if not arguments.only and not arguments.subset:
        for name in sorted(baseline.keys() - outcomes.keys()):
            unexpected[name] = "is in the baseline, but no longer in the suite"
            print(f"UNEXPECTED {name}: {unexpected[name]}")
    if arguments.write_baseline:
        _write_baseline(arguments.ranks, outcomes)
    if arguments.json:
        _write_json(arguments, outcomes, unexpected)

    counts = collections.Counter(outcome.outcome for outcome in outcomes.values())
    print(
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped"
        f" ({len(unexpected)} unexpected; {arguments.backend}, {arguments.ranks} ranks)"
    )
    if baseline:
        print(_beside_gloo(outcomes, baseline))
    if not outcomes:
        print("no test was chosen")
        return 1
    return 1 if unexpected else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.torch_suite.run")
    parser.add_argument("--backend", default="dscomm", choices=["dscomm", "gloo"])
    parser.add_argument("--ranks", type=int, default=2, choices=[2, 4])
    parser.add_argument("--only", metavar="PATTERN", help="tests in whose name this is found")
    parser.add_argument("--subset", action="store_true", help="without what gloo skips")
    parser.add_argument("--json", metavar="FILE", help="also write the outcomes to a file")
    parser.add_argument("--limit-s", type=float, default=_LIMIT_S, help="of one test")
    parser.add_argument("--write-baseline", action="store_true", help="all tests, gloo only")
    arguments = parser.parse_args()
    if arguments.write_baseline and (
        arguments.backend != "gloo" or arguments.only or arguments.subset
    ):
        parser.error("--write-baseline is for all tests with gloo")
    return arguments


def _leave(signal_number: int, frame: object) -> NoReturn:
    """As an exception, so that the ranks of the test at hand are killed on the way out."""
    sys.exit(128 + signal_number)


def _choose(names: list[str], arguments: argparse.Namespace, baseline: dict[str, str]) -> list[str]:
    if arguments.only:
        names = [name for name in names if re.search(arguments.only, name)]
    if arguments.subset:
        left_out = [name for name in names if baseline.get(name, "").startswith("skipped")]
        print(f"{len(left_out)} tests that gloo skips, most for want of a GPU, are left out")
        names = [name for name in names if name not in left_out]
    return names


def _variants(name: str, backend: str) -> list[bool]:
    """Whether the test's name check is answered, for each time that it is run."""
    both = backend == "dscomm" and name in exceptions.NAME_CHECK_ANSWERED
    return [False, True] if both else [False]


def _surprise(outcome: Outcome, gloo: str | None, listed: exceptions.Failure | None) -> str:
    """What is wrong with the outcome of a test; nothing when it is as it should be."""
    if gloo is None:
        return "is not in the baseline"
    if listed and gloo == "passed":
        if outcome.outcome != "failed":
            return f"{outcome.outcome}, but is listed as a failure: {listed.reason}"
        if not re.search(listed.message, outcome.detail):
            return f"failed otherwise than listed: {listed.message}"
        return ""
    if outcome.outcome == "failed" and gloo != "failed":
        return f"failed; gloo: {gloo}"
    if outcome.outcome == "skipped" and not gloo.startswith("skipped"):
        return f"skipped; gloo: {gloo}"
    return ""


def _beside_gloo(outcomes: dict[str, Outcome], baseline: dict[str, str]) -> str:
    gloo = {name for name in outcomes if baseline.get(name) == "passed"}
    here = {name for name, outcome in outcomes.items() if outcome.outcome == "passed"}
    more = len(here & baseline.keys()) - len(here & gloo)
    return f"of the {len(gloo)} that gloo passes, {len(here & gloo)} passed; {more} more did"


def _print_test(
    title: str, outcome: Outcome, surprise: str, listed: exceptions.Failure | None
) -> None:
    reason = f" ({outcome.detail})" if outcome.outcome == "skipped" else ""
    if outcome.outcome == "failed" and not surprise:
        reason = f" (as listed: {listed.reason})" if listed else " (gloo fails as well)"
    print(f"{outcome.outcome:8} {outcome.seconds:6.1f} s  {title}{reason}")
    if outcome.outcome == "failed" and surprise:
        print(textwrap.indent(outcome.detail, "    | "))
    if surprise:
        print(f"    UNEXPECTED: {surprise}")
    sys.stdout.flush()


def _read_baseline(ranks: int) -> dict[str, str]:
    if not BASELINE.exists():
        return {}
    document = json.loads(BASELINE.read_text())
    return {
        name: by_ranks[str(ranks)]
        for name, by_ranks in document["outcomes"].items()
        if str(ranks) in by_ranks
    }


def _write_baseline(ranks: int, outcomes: dict[str, Outcome]) -> None:
    import torch

    document = json.loads(BASELINE.read_text()) if BASELINE.exists() else {"outcomes": {}}
    if document.get("torch") != torch.__version__:
        document = {"outcomes": {}}
    merged = document["outcomes"]
    for name, outcome in outcomes.items():
        reason = f": {outcome.detail}" if outcome.outcome == "skipped" else ""
        merged.setdefault(name, {})[str(ranks)] = outcome.outcome + reason
    document = {
        "command": "python -m tests.torch_suite.run --backend gloo --ranks 2|4 --write-baseline",
        "torch": torch.__version__,
        "outcomes": merged,
    }
    BASELINE.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


def _write_json(
    arguments: argparse.Namespace, outcomes: dict[str, Outcome], unexpected: dict[str, str]
) -> None:
    import torch

    document = {
        "backend": arguments.backend,
        "ranks": arguments.ranks,
        "torch": torch.__version__,
        "tests": {
            name: {
                "outcome": outcome.outcome,
                "detail": outcome.detail,
                "seconds": round(outcome.seconds, 2),
            }
            for name, outcome in outcomes.items()
        },
        "unexpected": unexpected,
    }
    pathlib.Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
