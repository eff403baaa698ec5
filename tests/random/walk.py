"""Walks through random programs and reports those that fail; replays and shrinks them.

  walk.py                    random programs for a minute, two at a time
  walk.py --seconds 600      for longer
  walk.py --seed 17          one program, with its output; --times 20 repeats it
  walk.py --file FILE        a program in JSON, as written by --shrink
  walk.py --seed 17 --shrink the smallest program with the same failure, as JSON
  walk.py --slow             also faults that cost their whole timeout
  walk.py --hosts 3          across hosts, which are network namespaces
  walk.py --self-test        checks that injected defects are found and shrunk

Seeds count up from --first, by default the time of day. A program that fails is run again, to
measure how often it fails; its ranks' reports and output are kept in build/random.
Ranks are forked from warm processes: see runner.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import select
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from program import REDUCING, SHORT_TIMEOUT_S, Program, generate
from runner import Runner
from shrink import Shrinker, kind_of

FOUND = Path(__file__).resolve().parent / "found"
KEPT = FOUND.parents[2] / "build" / "random"
AT_ONCE = 2
RUNS_OF_A_CANDIDATE = 4
DEFECTS = ["wrong", "drop", "crash"]


def summary(program: Program) -> str:
    fault = program["faults"][0]["kind"] if program["faults"] else "no fault"
    return f"{program['size']} ranks, {len(program['steps'])} steps, {fault}"


def report(name: str, program: Program, answer: dict[str, Any], again: str, most: int = 6) -> None:
    print(f"FAILED {name} ({summary(program)}){again}")
    for problem in answer["problems"][:most]:
        print("   ", problem[:1500].replace("\n", "\n    "))
    if len(answer["problems"]) > most:
        print(f"    ... and {len(answer['problems']) - most} more")
    sys.stdout.flush()


def keep(program: Program, answer: dict[str, Any]) -> None:
    """Keeps a failure's texts, in case it does not happen again."""
    KEPT.mkdir(parents=True, exist_ok=True)
    parts = [json.dumps(program), *answer["problems"]]
    parts += [*answer.get("outputs", []), *answer.get("reports", [])]
    (KEPT / str(program["seed"])).write_text("\n----\n".join(parts))


def how_often(runner: Runner, program: Program, kind: str, times: int = 3) -> str:
    failures = sum(kind_of(runner.run(program)["problems"]) == kind for _ in range(times))
    return f", and {failures} of {times} times again"


def run_all(
    programs: Iterator[tuple[str, Program]], nice: int = 0
) -> Iterator[tuple[str, Program, dict[str, Any], Runner]]:
    """Runs programs, several at a time; yields names, programs, answers, and each one's idle
    runner."""
    runners = [Runner(nice) for _ in range(AT_ONCE)]
    busy: dict[int, tuple[Runner, str, Program]] = {}
    idle = list(runners)
    try:
        while True:
            while idle and (following := next(programs, None)) is not None:
                runner = idle.pop()
                runner.send(following[1])
                busy[runner.fileno()] = (runner, *following)
            if not busy:
                return
            for descriptor in select.select(list(busy), [], [])[0]:
                runner, name, program = busy.pop(descriptor)
                yield name, program, runner.receive(), runner
                idle.append(runner)
    finally:
        for runner in runners:
            runner.close()


def on_hosts(program: Program, count: int, mpi: str) -> Program:
    """The same program across hosts, over this MPI. Each rank is a process, and ends in order,
    because data that MPI has not sent yet is lost with its process. Other hosts are not told that a
    rank has left a group. The longest calls are made longer, so that the work inside and between
    hosts overlaps."""
    program["processes"] = [[rank] for rank in range(program["size"])]
    program["cpus"] = None
    for name in [name for name in program["environment"] if "TOPOLOGY" in name]:
        del program["environment"][name]
    program["faults"] = [fault for fault in program["faults"] if fault["kind"] != "leave"]
    program["endings"] = ["return" if how == "exit" else how for how in program["endings"]]
    program["environment"]["DSCOMM_MPI"] = mpi
    if program["timeout_s"] == SHORT_TIMEOUT_S:  # these ranks also start MPI, which took up to 7 s
        program["timeout_s"] *= 2
        for fault in program["faults"]:
            if fault["kind"] in ("stop_long", "stop_all"):
                fault["for_ms"] *= 2
    for step in program["steps"]:
        if step.get("call") in (*REDUCING, "broadcast", "all_gather_into_tensor"):
            is_long = step["count"] > 3000 and "splits" not in step
            step["count"] *= 25 if is_long else 1
    program["hosts"] = [rank * count // program["size"] for rank in range(program["size"])]
    return program


def walk(first: int, arguments: argparse.Namespace) -> int:
    """Runs programs by seed until the time is over; returns how many failed."""
    began = time.monotonic()
    done = failed = 0

    def programs() -> Iterator[tuple[str, Program]]:
        for seed in itertools.count(first):
            if time.monotonic() >= began + arguments.seconds:
                return
            program = generate(seed, arguments.slow)
            options = " --slow" if arguments.slow else ""
            if arguments.hosts:
                options += f" --hosts {arguments.hosts} --mpi {arguments.mpi}"
                program = on_hosts(program, arguments.hosts, arguments.mpi)
            yield f"seed {seed}{options}", program

    for name, program, answer, runner in run_all(programs(), arguments.nice):
        done += 1
        if answer["problems"]:
            failed += 1
            keep(program, answer)
            again = how_often(runner, program, kind_of(answer["problems"]))
            report(name, program, answer, again)
    rate = done / (time.monotonic() - began) * 60
    print(f"{done} programs from seed {first} on, {rate:.0f} a minute: {failed} failed")
    return failed


def replay_found() -> int:
    """Runs the programs that once failed; returns how many still do. Those in found/pending, whose
    faults are known and not fixed yet, are listed and do not count."""
    paths = [*sorted(FOUND.glob("*.json")), *sorted((FOUND / "pending").glob("*.json"))]
    programs = ((str(path), json.loads(path.read_text())) for path in paths)
    repeated = ((n, p) for n, p in programs for _ in range(p.get("times", 1)))
    fails: dict[str, bool] = dict.fromkeys(map(str, paths), False)
    for name, program, answer, _ in run_all(repeated):
        pending = Path(name).parent != FOUND
        if answer["problems"] and not fails[name]:
            fails[name] = True
            if not pending:
                report(Path(name).name, program, answer, "")
    failed = sum(fails[name] for name in fails if Path(name).parent == FOUND)
    for name in fails:
        if Path(name).parent != FOUND:
            print(f"known fault, {'still there' if fails[name] else 'gone'}: {Path(name).stem}")
    print(f"{len(paths)} programs that failed once: {failed} failed")
    return failed


def shrink(
    program: Program, runner: Runner, seconds: float, runs: int, quiet: bool = False
) -> Program:
    kind = ""
    for _ in range(runs * 3):
        if kind := kind_of(runner.run(program)["problems"]):
            break
    if not kind:
        raise SystemExit(f"the program did not fail in {runs * 3} runs")

    def fails(candidate: Program) -> bool:
        return any(kind_of(runner.run(candidate)["problems"]) == kind for _ in range(runs))

    say = (lambda text: None) if quiet else (lambda text: print(text, file=sys.stderr))
    return Shrinker(fails, seconds, say).shrink(program)


def self_test(first: int) -> int:
    """Gives a rank a defect, which must be found; then shrinks one of the programs."""
    runner, failed = Runner(), 0
    for defect in DEFECTS:
        found = 0
        for seed in range(first, first + 40):
            program = generate(seed)
            if program["faults"] or len(program["processes"]) < program["size"]:
                continue
            program["timeout_s"] = 1.5
            program["sabotage"] = {"rank": seed % program["size"], "call": 2, "how": defect}
            answer = runner.run(program)
            if not answer["problems"]:
                continue  # its rank makes no second call, or one without a result
            found += 1
            if defect == "wrong":
                smaller = shrink(program, runner, 30, 1, quiet=True)
                if len(smaller["steps"]) > 4 or smaller["size"] > 2:
                    failed += 1
                    print(f"FAILED: seed {seed} was shrunk to no less than {summary(smaller)}")
            break
        if not found:
            failed += 1
            print(f"FAILED: a rank with the defect '{defect}' was not found")
    if json.dumps(generate(first)) != json.dumps(generate(first)):
        failed += 1
        print("FAILED: a seed does not give the same program twice")
    runner.close()
    print(f"defects put in: {len(DEFECTS)}, {failed} checks failed")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--first", type=int, default=None, help="the first seed")
    parser.add_argument("--seed", type=int, default=None, help="replay this one")
    parser.add_argument("--file", type=Path, default=None, help="replay a program in JSON")
    parser.add_argument("--times", type=int, default=1, help="of a replay")
    parser.add_argument("--runs", type=int, default=RUNS_OF_A_CANDIDATE, help="of a candidate")
    parser.add_argument("--shrink", action="store_true")
    parser.add_argument("--slow", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    parser.add_argument("--hosts", type=int, default=0, help="so many, of network namespaces")
    parser.add_argument(
        "--mpi", default="openmpi", choices=["openmpi", "mpich"], help="between them"
    )
    parser.add_argument("--found", action="store_true", help="replay tests/random/found first")
    parser.add_argument("--verbose", action="store_true", help="reports and output of the ranks")
    parser.add_argument("--nice", type=int, default=0)
    arguments = parser.parse_args()
    return across_hosts(arguments) if arguments.hosts else run(arguments)


def across_hosts(arguments: argparse.Namespace) -> int:
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from tests.cluster.hosts import Hosts, why_not
    from tests.cluster.jobs import has_mpich

    if why_not():
        print(f"no programs across hosts: {why_not()}")
        return 0
    if arguments.mpi == "mpich" and not has_mpich():
        print("no programs over MPICH: this build is without it")
        return 0
    with tempfile.TemporaryDirectory() as folder, Hosts(arguments.hosts, Path(folder)) as hosts:
        os.environ["WALK_HOSTS"] = ",".join(str(host.pid) for host in hosts)
        return run(arguments)


def run(arguments: argparse.Namespace) -> int:
    if arguments.seed is not None or arguments.file is not None:
        return replay(arguments)
    first = int(time.time()) * 1000 if arguments.first is None else arguments.first
    failed = 0
    if arguments.self_test:
        failed += self_test(1)
    if arguments.found:
        failed += replay_found()
    if arguments.seconds > 0:
        failed += walk(first, arguments)
    return int(failed > 0)


def replay(arguments: argparse.Namespace) -> int:
    if arguments.file is not None:
        program: Program = json.loads(arguments.file.read_text())
    else:
        program = generate(arguments.seed, arguments.slow)
        if arguments.hosts:
            program = on_hosts(program, arguments.hosts, arguments.mpi)
    runner, failed = Runner(arguments.nice), 0
    try:
        if arguments.shrink:
            program = shrink(program, runner, 600, arguments.runs)
            print(json.dumps(program))
        for _ in range(arguments.times):
            answer = runner.run(program)
            if answer["problems"]:
                failed += 1
                report(f"seed {program['seed']}", program, answer, "", 50)
                if arguments.verbose:
                    print(*answer["outputs"], *answer["reports"], sep="\n----\n")
        if arguments.verbose and not arguments.shrink:
            print(json.dumps(program))
        print(f"{arguments.times} runs, {failed} failed", file=sys.stderr)
    finally:
        runner.close()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
