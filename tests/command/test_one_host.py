"""make bench: the runs of one host, what they are sorted into, and the arithmetic of the tables."""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from benchmarks.one_host import __main__ as bench
from benchmarks.one_host import bound, fetch, peers, runs, states, tables
from benchmarks.one_host.rows import Pair, Row, pairs_of, rows_of

ROOT = Path(__file__).resolve().parents[2]

two_cores = pytest.mark.skipif(
    states.cpus_of_ranks(os.sched_getaffinity(0), 2) is None,
    reason="ranks are bound to cores, of which this machine has one",
)
MODES = ("tight", "touch")
KIND = ("all_reduce", "float32", "tight", "near")
PLAN = runs.Plan("all_reduce", (64,), MODES, budget_ms=0.1, limit_s=60)


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores that stay where they are, which those of a virtual machine need not do."""
    monkeypatch.setattr(runs, "probe", lambda program, cpus: 50.0)
    monkeypatch.setattr(runs, "state_between", lambda before_ns, after_ns: "near")


@two_cores
def test_run_with_dscomm_and_gloo_measures_every_case(
    near: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given = ["--peers", "dscomm", "gloo", "--sizes", "8", "4K", "--rounds", "1", "--budget-ms", "1"]
    monkeypatch.setattr(sys, "argv", ["bench", *given, "--out", str(tmp_path)])
    assert bench.main() == 0
    content = json.loads((tmp_path / "one_host.json").read_text())
    rows = content["rows"]
    cases = {(row["peer"], row["op"], row["dtype"], row["size"], row["mode"]) for row in rows}
    kinds = [("all_reduce", "float32"), ("all_reduce", "bfloat16"), ("ping_pong", "float32")]
    wanted = {
        (peer, *kind, size, mode)
        for peer, kind, size, mode in itertools.product(("dscomm", "gloo"), kinds, (8, 4096), MODES)
    }
    # Old gloo has no bfloat16, and that is said.
    lacking = {case for case in wanted if (case[0], case[2]) == ("gloo", "bfloat16")}
    refused = [line for line in content["refused"] if line.startswith("gloo has no bfloat16: ")]
    assert cases == (wanted - lacking if refused else wanted) and len(rows) == len(cases)
    for row in rows:
        assert (row["ranks"], row["state"], row["runs"]) == (2, "near", 1)
        assert row["wrong"] == 0 and row["p99_us"] >= row["median_us"] > 0
        assert set(row) == {field.name for field in dataclasses.fields(Row)}
    pictures = sorted(tmp_path.glob("*.png"))
    assert [file.name for file in pictures] == [
        "one_host_bfloat16_2_ranks.png",
        "one_host_float32_2_ranks.png",
        "one_host_ping_pong_2_ranks.png",
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in pictures)


@two_cores
def test_messages_flag_measures_ping_pong_alone(
    near: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From C++ with both kinds of memory, and from Python in both ways; oneCCL is not asked."""
    given = ["--messages", "--peers", "dscomm", "pool", "torch", "oneccl", "--sizes", "8", "64K",
             "--rounds", "1", "--budget-ms", "1", "--out", str(tmp_path)]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["bench", *given])
    assert bench.main() == 0
    content = json.loads((tmp_path / "one_host_ping_pong.json").read_text())
    rows = content["rows"]
    assert content["left_out"] == {} and "oneCCL" not in content["versions"]
    assert {(row["op"], row["wrong"]) for row in rows} == {("ping_pong", 0)}
    assert {(row["peer"], row["size"], row["mode"]) for row in rows} == set(
        itertools.product(
            ("dscomm", "dscomm pool", "dscomm torch", "dscomm direct"), (8, 65536), MODES
        )
    )
    # What is kept of all-reduces stays.
    assert [file.name for file in sorted(tmp_path.iterdir())] == [
        "one_host_ping_pong.json",
        "one_host_ping_pong_2_ranks.png",
    ]


@two_cores
def test_latency_probe_returns_positive_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = states.cpus_of_ranks(os.sched_getaffinity(0), 2)
    assert cpus is not None
    assert states.probe(peers.own_programs() / "one_host_probe", cpus) > 1


def peer_of_source(text: str, folder: Path) -> peers.Peer:
    """One that is written here, over the headers of the benchmark."""
    source, program = folder / "peer.cc", folder / "peer"
    source.write_text(text)
    command = ["g++", "-std=c++20", f"-I{peers.HERE}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=300)
    return peers.Peer("0", peers.one_process_per_rank(str(program)))


@two_cores
def test_competitor_that_reduces_nothing_has_wrong_elements(near: None, tmp_path: Path) -> None:
    source = """
#include "all_reduce.h"
int main(int count, char** arguments) {
  const one_host::Options options = one_host::parse(count, arguments);
  one_host::Meeting meeting(options);
  one_host::measure(options, meeting, [](void*, size_t, one_host::DType) {});
}
"""
    peer = peer_of_source(source, tmp_path)
    for dtype in ("float32", "bfloat16"):
        run = runs.run_once("idle", peer, 2, dtype, PLAN, Path())
        assert run.failure == "" and [row["mode"] for row in run.rows] == ["tight", "touch"]
        assert all(row["wrong"] > 0 for row in run.rows)


# Messages through a file that both ranks map, in turns: a word that counts, then the data. The
# rank LOST keeps what it had in place of every third message.
FILE_MESSAGES = """
#include "ping_pong.h"
int main(int count, char** arguments) {
  const one_host::Options options = one_host::parse(count, arguments);
  one_host::Meeting meeting(options);
  int file = ::open((options.meet + ".data").c_str(), O_RDWR | O_CREAT, 0600);
  if (::ftruncate(file, 1 << 20) != 0) return 1;
  auto* memory = static_cast<char*>(
      ::mmap(nullptr, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  auto* turn = reinterpret_cast<std::atomic<uint64_t>*>(memory);
  const int loser = std::atoi(std::getenv("LOST"));
  uint64_t messages = 0;  // sent by either rank; the turn is of the next one's receiver
  const one_host::Messages calls{
      [&](const void* data, size_t bytes, int) {
        std::memcpy(memory + 64, data, bytes);
        turn->store(++messages);
      },
      [&](void* data, size_t bytes, int) {
        ++messages;
        while (turn->load() < messages) one_host::pause();
        const bool lost = options.rank == loser && messages / 2 % 3 == 2;
        if (!lost) std::memcpy(data, memory + 64, bytes);
      }};
  one_host::measure_messages(options, meeting, calls);
}
"""


@two_cores
def test_lost_messages_are_counted_as_wrong(near: None, tmp_path: Path) -> None:
    plan = dataclasses.replace(PLAN, op="ping_pong", sizes=(8, 4096))
    peer = peer_of_source(FILE_MESSAGES, tmp_path)
    for loser in (-1, 0, 1):
        peer.environment["LOST"] = str(loser)
        run = runs.run_once("peer", peer, 2, "float32", plan, Path())
        assert run.failure == "" and run.op == "ping_pong"
        assert [row["mode"] for row in run.rows] == ["tight", "touch"] * 2
        assert all((row["wrong"] > 0) == (loser >= 0) for row in run.rows), (
            loser,
            [(row["size"], row["mode"], row["samples"], row["wrong"]) for row in run.rows],
        )


@two_cores
def test_failing_or_hanging_competitor_is_reported(near: None) -> None:
    def shell(script: str) -> peers.Peer:
        return peers.Peer("0", lambda flags, ranks: [["sh", "-c", script]] * ranks)

    fails = shell("echo hello; echo an error of its own >&2; exit 3")
    run = runs.run_once("fails", fails, 2, "float32", PLAN, Path())
    assert run.failure == "exit status 3: an error of its own" and run.rows == []
    if runs.SHARED.is_dir():  # what it leaves there goes
        before = set(runs.SHARED.iterdir())
        leaves = peers.Peer("0", lambda flags, ranks: [["cp", flags(0)[7], "/dev/shm"]])
        assert runs.run_once("leaves", leaves, 2, "float32", PLAN, Path()).failure == ""
        assert set(runs.SHARED.iterdir()) <= before
    hangs = shell("sleep 1000")
    short = dataclasses.replace(PLAN, limit_s=0.2)
    run = runs.run_once("hangs", hangs, 2, "float32", short, Path())
    assert run.failure == "took too long: no word"


def test_row_state_is_that_shown_by_its_own_latencies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else that of the whole run."""
    monkeypatch.setattr(runs, "probe", lambda program, cpus: 50.0)
    whole, own = '{"row": 1}', '{"row": 2, "before_ns": 200, "after_ns": 220}'
    script = f"printf '%s\\n' '{whole}' '{own}' > $0"
    peer = peers.Peer("0", lambda flags, ranks: [["sh", "-c", script, flags(0)[9]]])
    run = runs.run_once("writes", peer, 2, "float32", PLAN, Path())
    assert [(row["row"], row["state"]) for row in run.rows] == [(1, "near"), (2, "far")]


def test_unavailable_competitor_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing() -> peers.Peer:
        raise fetch.Unavailable("it is on the moon")

    monkeypatch.setitem(bench.PEERS, "vllm", missing)
    monkeypatch.setitem(bench.PEERS, "mpich", lambda: peers.Peer("0", lambda flags, ranks: []))
    said = io.StringIO()
    ready, left_out = bench.prepared(["vllm", "mpich"], None, Console(file=said, width=200))
    assert list(ready) == ["mpich"] and left_out == {"vllm": "it is on the moon"}
    assert said.getvalue() == "vLLM is left out: it is on the moon\n"


def test_folder_is_made_once_and_only_when_complete(tmp_path: Path) -> None:
    made: list[str] = []

    def make(text: str) -> Path:
        def fill(part: Path) -> None:
            made.append(text)
            (part / "file").write_text(text)
            if text == "bad":
                raise fetch.Unavailable("bad")

        return fetch.made_once(tmp_path / "folder", text, fill)

    assert (make("1") / "file").read_text() == "1"
    assert (make("1") / "file").read_text() == "1" and made == ["1"]
    with pytest.raises(fetch.Unavailable):
        make("bad")
    assert (make("2") / "file").read_text() == "2"
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_missing_or_failing_tool_is_reported() -> None:
    with pytest.raises(fetch.Unavailable, match="^trying: .*no-such-tool"):
        fetch.run_tool(["no-such-tool"], "trying")
    with pytest.raises(fetch.Unavailable, match="^trying failed: E: gone$"):
        fetch.run_tool(["sh", "-c", "echo hello; echo E: gone; exit 1"], "trying")


@pytest.mark.parametrize(
    ("before", "after", "state"),
    [
        (22, 39.9, "same core"),
        (39, 41, "mixed"),
        (47, 54, "near"),
        (99.9, 40, "near"),
        (100, 40, "mixed"),
        (185, 254, "far"),
        (150.1, 200, "far"),
        (150, 200, "mixed"),
        (40, 200, "mixed"),
        (200, 40, "mixed"),
        (120, 120, "mixed"),
        (999, 200, "far"),
        (1000, 200, "mixed"),
    ],
)
def test_state_follows_latency_before_and_after(before: float, after: float, state: str) -> None:
    assert states.state_between(before, after) == state


def test_ranks_get_separate_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    # Cpus 0 and 1 are threads of one core, and so on.
    monkeypatch.setattr(states, "core_count", lambda cpus: len({cpu // 2 for cpu in cpus}))
    assert states.cpus_of_ranks({5, 0, 1, 2, 3, 4}, 3) == [0, 2, 4]
    assert states.cpus_of_ranks({0, 1, 2}, 2) == [0, 2]
    assert states.cpus_of_ranks({0, 1}, 2) is None


def run_of(peer: str, state: str, median: float, **more: Any) -> runs.Run:
    row = {"peer": peer, "dtype": "float32", "size": 8, "mode": "tight", "median_us": median,
           "p99_us": 2 * median, "wrong": 1, "state": state}  # fmt: skip
    return runs.Run(peer, "all_reduce", 2, "float32", [row], **more)


def test_rows_are_medians_of_good_runs_per_competitor_and_state() -> None:
    found = rows_of(
        [
            *(run_of("a", "near", time) for time in (3, 1, 2)),
            run_of("a", "mixed", 100),
            run_of("a", "near", 100, failure="ended early"),
            run_of("a", "far", 7),
            run_of("b", "near", 4),
        ]
    )
    assert len(found) == 3
    assert {(row.peer, row.state): (row.median_us, row.p99_us, row.runs, row.wrong)
            for row in found} == {
        ("a", "near"): (2, 4, 3, 3), ("a", "far"): (7, 14, 1, 1), ("b", "near"): (4, 8, 1, 1),
    }  # fmt: skip


def row(peer: str, size: int, time: float, ranks: int = 2) -> Row:
    return Row(peer, "all_reduce", "float32", size, ranks, "tight", "near", time, time, 1, 0)


def test_best_competitor_is_never_dscomm_itself() -> None:
    rows = [row("dscomm", 8, 0.5), row("dscomm direct", 8, 0.1), row("a", 8, 1), row("b", 8, 2),
            row("dscomm", 64, 4), row("a", 64, 9), row("b", 64, 2),
            row("a", 512, 1), row("dscomm", 4096, 1)]  # fmt: skip
    lines = tables.lines_of(rows, *KIND, 2)
    assert [(line.size, line.best, line.ratio) for line in lines] == [
        (8, "a", 2.0),
        (64, "b", 0.5),
        (512, "a", None),
        (4096, None, None),
    ]
    assert tables.mean_ratio(lines) == pytest.approx(1.0)
    assert lines[0].of_bound == pytest.approx(0.5 / bound.bound_us("all_reduce", 8, "near", 2))
    assert lines[2].of_bound is None
    assert tables.lines_of(rows, "all_reduce", "float32", "tight", "far", 2) == []
    assert tables.mean_ratio([]) is None


@two_cores
def test_before_flag_also_measures_given_checkout(
    near: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--peers", "dscomm", "gloo", "--sizes", "8", "--dtypes", "float32", "--rounds", "1"]
    given += ["--operations", "all_reduce", "--modes", "tight", "--budget-ms", "1"]
    given += ["--before", str(ROOT), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["bench", *given])
    assert bench.main() == 0
    content = json.loads((tmp_path / "one_host.json").read_text())
    assert {row["peer"] for row in content["rows"]} == {"dscomm", "before dscomm", "gloo"}
    assert "before dscomm" in content["versions"]
    assert "dscomm: now/before " in capsys.readouterr().out


def test_row_is_slower_if_each_of_several_runs_took_longer_than_any_of_earlier_checkout() -> None:
    def of_runs(peer: str, *times: float) -> list[runs.Run]:
        return [run_of(peer, "near", time) for time in times]

    def pair(before: list[float], now: list[float]) -> Pair:
        rows = rows_of([*of_runs("before dscomm", *before), *of_runs("dscomm", *now)])
        [found] = pairs_of([*rows, *rows_of(of_runs("gloo", 1))])
        return found

    assert pair([1, 2, 3], [3.1, 4, 5]).is_slower
    assert pair([1, 2, 3], [3.1, 4, 5]).ratio == 2
    assert not pair([1, 2, 3], [3, 4, 5]).is_slower
    assert not pair([1, 2, 3], [9]).is_slower
    assert pairs_of(rows_of(of_runs("before dscomm", 1))) == []


def test_more_than_two_ranks_have_no_bound() -> None:
    [line] = tables.lines_of([row("dscomm", 8, 1.0, ranks=4), row("dscomm", 8, 9.0)], *KIND, 4)
    assert (line.medians, line.bound_us, line.of_bound) == ({"dscomm": 1.0}, None, None)


def test_tables_show_every_competitor_and_the_mean() -> None:
    lines = tables.lines_of([row("b", 1 << 20, 1234.5), row("dscomm", 1 << 20, 100)], *KIND, 2)
    said = io.StringIO()
    tables.show(Console(file=said, width=200), lines, "all_reduce")
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in
             said.getvalue().splitlines() if "│" in line]  # fmt: skip
    # In this order, ours first: size, dscomm, b, and what is made of them.
    assert cells == [
        ["1M", "100.0", "1234", "b", "12.35", "21.1", "4.73"],
        ["mean", "", "", "geometric", "12.35", "", ""],
    ]


@pytest.mark.parametrize(
    ("size", "near_us", "far_us"),
    [(8, 0.047, 0.186), (4096, 0.129, 0.447), (1 << 20, 21.1, 67.4), (4 << 20, 84.3, 268.9),
     (16 << 20, 1316, 746), (256 << 20, 21054, 11930)],
)  # fmt: skip
def test_bound_of_all_reduce_follows_size_and_state(
    size: int, near_us: float, far_us: float
) -> None:
    assert bound.bound_us("all_reduce", size, "near", 2) == pytest.approx(near_us, rel=0.01)
    assert bound.bound_us("all_reduce", size, "far", 2) == pytest.approx(far_us, rel=0.01)
    assert bound.bound_us("all_reduce", size, "same core", 2) is None
    assert bound.bound_us("all_reduce", size, "near", 4) is None
    assert bound.bound_us("ping_pong", size, "near", 2) is None


def test_sizes_are_written_in_powers_of_1024() -> None:
    sizes = [8, 1024, 4096, 1536, 1 << 20, 256 << 20]
    assert [tables.size_text(size) for size in sizes] == ["8", "1K", "4K", "1536", "1M", "256M"]
