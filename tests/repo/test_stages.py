"""tools/run_stages: what it runs together and reports, and that make drill has all the rest."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from source_tree import ROOT


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    loader = SourceFileLoader("run_stages", str(ROOT / "tools" / "run_stages"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, loader.name, module)  # where its dataclasses look for it
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    module.LOGS = tmp_path / "logs"
    return module


def test_only_compatible_stages_run_together(stages: ModuleType) -> None:
    """Two at a time, one of them computing; never two that are timed or write the same."""
    running: set[str] = set()
    seen: set[frozenset[str]] = set()
    order: list[str] = []
    lock = threading.Lock()

    def stage(name: str, kind: str, **options: Any) -> Any:
        def work(run: Any) -> int:
            with lock:
                running.add(name)
                order.append(name)
                seen.add(frozenset(running))
            time.sleep(0.02)
            with lock:
                running.discard(name)
            return 0

        return stages.Stage(name, kind, work, **options)

    tree = frozenset({"tree"})
    chosen = [
        stage("timed 1", stages.TIMED),
        stage("after", stages.TIMED, after=("compute 1",)),
        stage("compute 1", stages.COMPUTES, writes=tree),
        stage("compute 2", stages.COMPUTES),
        *(stage(f"ordinary {n}", stages.ORDINARY, writes=tree) for n in range(4)),
    ]
    report = stages.Report()
    stages.run_all(chosen, report, 2)
    assert sorted(order) == sorted(each.name for each in chosen)
    assert len(report.results) == len(chosen) and report.failures == 0
    assert max(map(len, seen)) == 2
    kinds = {each.name: each.kind for each in chosen}
    for pair in (each for each in seen if len(each) == 2):
        assert not all(each.startswith("ordinary") for each in pair), "both write the tree"
        assert pair != {"compute 1", "ordinary 0"}
        assert len({kinds[each] for each in pair}) == 2, pair
    assert order.index("after") > order.index("compute 1")

    order.clear()
    seen.clear()
    stages.run_all(chosen, stages.Report(), 1)
    assert max(map(len, seen)) == 1 and len(order) == len(chosen)

    # One that lasts takes nobody's place.
    order.clear()
    seen.clear()
    others_are_done = threading.Event()

    def lasts(run: Any) -> int:
        with lock:
            running.add("lasting")
        assert others_are_done.wait(30)
        return 0

    def last(run: Any) -> int:
        others_are_done.set()
        return 0

    names = tuple(each.name for each in chosen)
    lasting = stages.Stage("lasting", stages.LASTING, lasts)
    after_all = stages.Stage("last", stages.ORDINARY, last, after=names)
    report = stages.Report()
    stages.run_all([*chosen, after_all, lasting], report, 2)
    assert report.failures == 0 and max(map(len, seen)) == 3


def test_stages_report_failures_skips_and_slowest_tests(
    stages: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    results = '<testsuite><testcase classname="a" name="{}" time="{}"/></testsuite>'

    def passes(run: Any) -> int:
        run.result_file().write_text(results.format("slow", 9.5))
        run.result_file().write_text(results.format("quick", 0.5))
        program = "sum(range(10**6)); print('said')"
        return run.call(sys.executable, "-c", program, env={"HOME": None})

    def fails(run: Any) -> int:
        reasons = (
            f'<failure message="{"x" * 5000} was 4"/>',
            "<failure/><system-out>ran</system-out>",
        )
        cases = "".join(
            f'<testcase name="t{k}">{reason}</testcase>' for k, reason in enumerate(reasons)
        )
        run.result_file().write_text(f"<testsuite>{cases}</testsuite>")
        return run.call("sh", "-c", "exit 3")

    def skipped(run: Any) -> int:
        run.report.skip("a part", "it needs a moon")
        return stages.SKIPPED

    chosen = [
        stages.Stage("passes", stages.ORDINARY, passes),
        stages.Stage("fails", stages.ORDINARY, fails),
        stages.Stage("is not there", stages.ORDINARY, lambda run: 1 // 0),
        stages.Stage("skipped", stages.ORDINARY, skipped),
    ]
    report = stages.Report()
    files = stages.run_all(chosen, report, 2)
    outcomes = {each.name: each.outcome for each in report.results}
    assert outcomes == {
        "passes": "passed",
        "fails": "FAILED (3)",
        "is not there": "FAILED (1)",
        "skipped": "skipped",
    }
    assert report.failures == 2 and report.skips == ["a part: it needs a moon"]
    assert stages.slowest_tests(files)[:2] == [(9.5, "a::slow"), (0.5, "a::quick")]
    (first, reason), second = stages.failed_tests(files)
    assert first == "t0" and reason.startswith("xxx") and reason.endswith("x was 4")
    assert len(reason) < 2500 and second == ("t1", "ran")
    output = capsys.readouterr().out
    assert "=== passes\nsaid\n=== passes: passed, " in output
    assert "ZeroDivisionError" in output and "=== a part: skipped, it needs a moon" in output
    assert next(each.cpu_s for each in report.results if each.name == "passes") > 0


def test_resumed_run_leaves_out_stages_passed_on_the_same_files(
    stages: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tree = "one"
    monkeypatch.setattr(stages, "tree_hash", lambda: tree)
    results = {"passes": 0, "fails": 1, "is skipped": stages.SKIPPED, "comes after": 0}
    ran: list[str] = []

    def stage(name: str, *after: str) -> Any:
        work = lambda run: ran.append(name) or results[name]  # noqa: E731
        return stages.Stage(name, stages.ORDINARY, work, after=after)

    chosen = [*map(stage, list(results)[:3]), stage("comes after", "passes", "fails")]

    def run(resumes: bool) -> list[str]:
        ran.clear()
        record = stages.Record(tmp_path / "passed.json", resumes)
        stages.run_all(chosen, stages.Report(record), 1)
        return sorted(ran)

    every_stage = sorted(results)
    assert run(resumes=False) == every_stage
    assert run(resumes=True) == ["fails", "is skipped"]
    assert run(resumes=False) == every_stage
    results["fails"] = 0
    assert run(resumes=True) == ["fails", "is skipped"]
    assert run(resumes=True) == ["is skipped"]

    tree = "another"
    assert run(resumes=True) == every_stage
    tree = ""  # there are changes
    assert run(resumes=True) == every_stage
    assert run(resumes=True) == every_stage
    tree = "another"
    assert run(resumes=True) == ["is skipped"]


def test_stage_during_which_a_file_changes_is_not_recorded_as_passed(
    stages: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hashes = iter(["one", "another"])
    monkeypatch.setattr(stages, "tree_hash", lambda: next(hashes))
    record = stages.Record(tmp_path / "passed.json", resumes=True)
    chosen = [stages.Stage("a", stages.ORDINARY, lambda run: 0)]
    stages.run_all(chosen, stages.Report(record), 1)
    assert not record.passed and next(hashes, None) is None


def test_tree_hash_is_that_of_the_files_and_empty_after_a_change(
    stages: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    assert stages.tree_hash() == ""  # no repository
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(tmp_path))

    def commit(message: str) -> str:
        for words in (["add", "."], ["commit", "-q", "--allow-empty", "-m", message]):
            subprocess.run([*git, *words], check=True)
        return stages.tree_hash()

    subprocess.run([*git, "init", "-q"], check=True)
    (tmp_path / "file").write_text("one")
    first = commit("first")
    assert re.fullmatch("[0-9a-f]{40}", first) and commit("without a change") == first
    (tmp_path / "file").write_text("two")
    assert stages.tree_hash() == ""
    assert commit("second") not in ("", first)


def test_untimed_stages_have_lower_priority_than_timed_ones(
    stages: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the scheduler takes a session for a group, in which alone niceness counts."""
    autogroup = Path("/proc/self/autogroup")
    own_niceness = os.nice(0)
    program = f"import os; print('niceness', os.nice(0) - {own_niceness})"
    # The kernel lets others than root change it ten times a second, on the whole machine.
    sees_session = autogroup.exists() and os.geteuid() == 0
    if sees_session:
        program += f"; print('of the session', open('{autogroup}').read().split()[-1])"
    for kind, niceness in stages.NICENESS.items():
        stage = stages.Stage("a", kind, lambda run: run.call(sys.executable, "-c", program))
        stages.run_all([stage], stages.Report(), 1)
        output = capsys.readouterr().out
        assert f"niceness {niceness}\n" in output
        assert not sees_session or f"of the session {niceness}\n" in output


def commands(stages: ModuleType, which: str, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of all stages, which are not run."""
    monkeypatch.setattr(stages, "is_debians_torch", lambda python: False)
    monkeypatch.setattr(stages.shutil, "which", lambda name: f"/usr/bin/{name}")
    found: list[list[str]] = []
    report = stages.Report()
    for stage in getattr(stages, f"stages_of_{which}")(stages.environment_of("pypi"), report):
        run = stages.Run(stage, 1, report)
        run.call = lambda *command, env=None: found.append([str(word) for word in command]) or 0
        assert stage.work(run) == 0
    return found


def test_drill_runs_everything_that_make_test_leaves_out(
    stages: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    chooses = ("drill", "drill or not drill")

    def folders(which: str, marker: bool) -> set[str]:
        return {
            next(word for word in command if word.startswith("tests/"))
            for command in commands(stages, which, monkeypatch)
            if "pytest" in command and any(word in chooses for word in command) is marker
        }

    marked = {
        f"tests/{file.relative_to(ROOT / 'tests').parts[0]}"
        for file in (ROOT / "tests").glob("*/test_*.py")
        if "pytest.mark.drill" in file.read_text()
    }
    # The repository checks name the marker, and have no drill.
    assert marked - {"tests/repo"} <= folders("drill", marker=True)
    assert marked - {"tests/repo"} <= folders("test", marker=False)
    # pytest fails where it is left with no test.
    chosen = commands(stages, "drill", monkeypatch)
    alone = {word for command in chosen if "drill" in command for word in command}
    assert {
        word for word in alone if (ROOT / word).is_dir() and word.startswith("tests/")
    } <= marked
    for which in ("test", "drill"):
        chosen = commands(stages, which, monkeypatch)
        debian = [command for command in chosen if ".venv-debian" in " ".join(command)]
        ignored = [word for command in debian for word in command if word.startswith("--ignore=")]
        assert len(debian) == 4 and bool(ignored) is (which == "test")
        assert all((ROOT / word.partition("=")[2]).exists() for word in ignored)
        presets = [command[2] for command in chosen if command[0] == "ctest"]
        assert presets == ["release", "asan", "tsan"] + ["aarch64"] * (which == "drill")


def test_stage_for_aarch64_without_a_tool_is_skipped_and_names_the_package(
    stages: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        stages.shutil, "which", lambda name: None if name.startswith("qemu") else f"/usr/bin/{name}"
    )
    stages.LOGS.mkdir()
    stage = stages.core_tests_on_aarch64("aarch64")
    run = stages.Run(stage, 1, stages.Report())
    run.call = lambda *command, env=None: pytest.fail(f"{command} is run")
    assert stage.work(run) == stages.SKIPPED
    assert run.log.read_text() == "needs these packages: apt-get install qemu-user-static\n"


def test_names_left_out_by_stages_exist(stages: ModuleType) -> None:
    """A name that was left behind by a renaming would leave out nothing, without a word."""
    sources = "\n".join(file.read_text() for file in (ROOT / "tests" / "core").glob("*_test.cc"))
    names = [f"{a}.{b}" for a, b in re.findall(r"^TEST(?:_F|_P)?\((\w+), (\w+)\)", sources, re.M)]
    for pattern in stages.NOT_UNDER_QEMU:
        assert any(re.search(pattern, name) for name in names), pattern
    program = (ROOT / "tools" / "run_stages").read_text()
    left_out = re.findall(r'"(?:--deselect=tests/)?([\w/]+\.py)::(test_\w+)(?:\[\w+\])?"', program)
    assert len(left_out) == program.count(".py::test_")
    for file, name in left_out:
        path = ROOT / "tests" / (file if "/" in file else f"cluster/{file}")
        assert f"def {name}(" in path.read_text(), name


def core_tests_with(stages: ModuleType, pattern: str) -> set[str]:
    """The files of core tests in which a pattern is found."""
    texts = {file.stem: file.read_text() for file in (ROOT / "tests").glob("*/*_test.cc")}
    return {name for name in stages.core_test_files() if re.search(pattern, texts[name])}


def test_release_runs_what_sanitizers_run_in_part(stages: ModuleType) -> None:
    """make test compiles these core tests alone without a sanitizer."""
    differs = r"matrix|check_every_collective|check_disagreement|ONE_TARGET|__SANITIZE"
    assert core_tests_with(stages, differs) == set(stages.MORE_IN_RELEASE)


def test_thread_sanitizer_runs_what_has_threads(stages: ModuleType) -> None:
    """make test does not compile the others with it."""
    with_threads = r"std::(j?thread|async)|fork\(|run_ranks|shm_ranks|in_process|thread_team"
    without = set(stages.core_test_files()) - core_tests_with(stages, with_threads)
    assert without >= set(stages.IN_ONE_THREAD), without
