"""python -m deepspeed_comm.bench: its figures, its checks of results, its flags and files."""

from __future__ import annotations

import contextlib
import csv
import importlib
import io
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_comm.bench import __main__ as bench
from deepspeed_comm.bench import case, collectives, flags, measurement, plan, plot, report
from tests.cases.harness import World, run_fresh

SHORT = ("-n", "2", "-w", "1")
Told = tuple[int, str, str]  # exit status, standard output and error


def told(world: World, arguments: tuple[str, ...], prepare: Callable[..., None] | None) -> Told:
    """Of this rank. The first backend carries the group, as the program would have made it."""
    given = list(arguments)
    world.init(given[given.index("--backend") + 1] if "--backend" in given else "dscomm")
    bench.copy_rate = lambda ledger: 1.0  # tested on its own; it takes half a second
    if prepare is not None:
        prepare(world.rank)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = bench.main(given)
    return status, out.getvalue(), err.getvalue()


def run_bench(
    *arguments: str, ranks: int = 2, prepare: Callable[..., None] | None = None
) -> tuple[int, str]:
    """The exit status, the same on all ranks, and what rank 0 printed; the others print nothing."""
    results = run_fresh(ranks, told, arguments, prepare)
    statuses = {status for status, _, _ in results}
    assert len(statuses) == 1, results
    assert all(out == err == "" for _, out, err in results[1:]), results[1:]
    return statuses.pop(), results[0][1] + results[0][2]


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def check_all(path: Path, wanted: set[tuple[str, str]], backends: set[str]) -> None:
    """dscomm did all that was wanted, the others that or refused it; nothing was wrong."""
    content = json.loads(path.read_text())
    rows, refused = content["rows"], content["refused"]
    assert all(row["wrong"] == 0 and row["time_p99_us"] >= row["time_p50_us"] > 0 for row in rows)
    assert {each["backend"] for each in refused} <= backends - {"dscomm"}, refused
    for backend in backends:
        done = {(row["collective"], row["type"]) for row in rows if row["backend"] == backend}
        done |= {(r["collective"], r["type"]) for r in refused if r["backend"] == backend}
        assert done == wanted, backend


def test_every_collective_and_dtype_has_no_wrong_element(tmp_path: Path) -> None:
    status, output = run_bench(
        "all", "-d", "all", "-b", "8", "-e", "8K", "-f", "1024", *SHORT,
        "--backend", "dscomm", "gloo", "--json", str(tmp_path / "rows.json"),
    )  # fmt: skip
    assert status == 0, output
    wanted = set(itertools.product(collectives.COLLECTIVES, flags.DTYPES))
    wanted = {(name, dtype) for name, dtype in wanted if name != "barrier"} | {("barrier", "none")}
    assert len(wanted) >= 9 * 8 + 1
    check_all(tmp_path / "rows.json", wanted, {"dscomm", "gloo"})
    # gloo has float sums in every torch.
    rows = [row for row in rows_of(tmp_path / "rows.json") if row["collective"] == "all_reduce"]
    of_gloo = [
        row["size_bytes"] for row in rows if (row["type"], row["backend"]) == ("float", "gloo")
    ]
    assert of_gloo == [8, 8192]


def test_every_op_and_root_on_three_ranks_has_no_wrong_element(tmp_path: Path) -> None:
    """Three, whose mean is no power of two's; sizes that three ranks do not divide."""
    reducing = ("all_reduce", "reduce", "reduce_scatter")
    status, output = run_bench(
        *reducing, "broadcast", "gather", "scatter", "-o", "all", "-r", "all", "-d", "bfloat16",
        "-b", "100", "-e", "10K", "-i", "9000", *SHORT, "--json", str(tmp_path / "rows.json"),
        ranks=3,
    )  # fmt: skip
    assert status == 0, output
    rows = rows_of(tmp_path / "rows.json")
    assert all(row["wrong"] == 0 for row in rows)
    for name in reducing:
        assert {row["redop"] for row in rows if row["collective"] == name} == set(flags.OPS)
    for name in ("reduce", "broadcast", "gather", "scatter"):
        assert {row["root"] for row in rows if row["collective"] == name} == {0, 1, 2}
    # 100 bytes are 50 elements, 16 for each rank.
    assert {(row["size_bytes"], row["count"]) for row in rows if row["collective"] == "gather"} == {
        (96, 16),
        (9096, 1516),
    }


def test_direct_flag_adds_rows_of_direct_calls(tmp_path: Path) -> None:
    for more in (("--touch",), ("-m", "3")):
        status, output = run_bench(
            "all_reduce", "ping_pong", "barrier", "--direct", *more, "-b", "4K", "-e", "4K", *SHORT,
            "--json", str(tmp_path / "rows.json"),
        )  # fmt: skip
        assert status == 0, output
        assert [(row["collective"], row["backend"]) for row in rows_of(tmp_path / "rows.json")] == [
            ("all_reduce", "dscomm"),
            ("all_reduce", "dscomm-direct"),
            ("ping_pong", "dscomm"),
            ("ping_pong", "dscomm-direct"),
            ("barrier", "dscomm"),
        ]


@pytest.mark.parametrize(
    ("name", "count", "factor"),
    [  # of 960 bytes of float32 over four ranks
        ("all_reduce", 240, 1.5),
        ("all_gather", 60, 0.75),
        ("reduce_scatter", 60, 0.75),
        ("broadcast", 240, 1.0),
        ("reduce", 240, 1.0),
        ("gather", 60, 0.75),
        ("scatter", 60, 0.75),
        ("all_to_all", 60, 0.75),
        ("send_recv", 240, 1.0),
        ("ping_pong", 240, 2.0),
        ("exchange", 240, 2.0),
        ("barrier", 240, 0.0),
    ],
)
def test_bandwidths_match_nccl_tests(name: str, count: int, factor: float) -> None:
    collective = collectives.COLLECTIVES[name]
    assert collective.count(963, 4, 4) == count
    assert collective.size(count, 4, 4) == 960
    # 3 GB in half a second.
    assert collectives.bandwidths(name, 3 * 10**9, 0.5, 4) == (6.0, 6.0 * factor)


def test_bandwidth_test_covers_every_collective() -> None:
    [mark] = test_bandwidths_match_nccl_tests.pytestmark  # type: ignore[attr-defined]
    assert [each[0] for each in mark.args[1]] == list(collectives.COLLECTIVES)


def rank_dependent_times(rank: int) -> None:
    """Samples of 1, 2 ... us on rank 0 and the other way round on rank 1."""
    samples = itertools.count()

    def fake(call: Callable[[], object], calls: int) -> float:
        call()
        place = next(samples)
        return 1e-6 * (place + 1 if rank == 0 else 100 - place)

    measurement.seconds_per_call = fake


def test_time_of_each_sample_is_that_of_slowest_rank(tmp_path: Path) -> None:
    status, output = run_bench(
        "-b", "1K", "-e", "1K", "-n", "100", "--json", str(tmp_path / "rows.json"),
        prepare=rank_dependent_times,
    )  # fmt: skip
    assert status == 0, output
    [row] = rows_of(tmp_path / "rows.json")
    # Of 51, 51, 52, 52 ... 100, 100 us.
    assert row["time_p50_us"] == pytest.approx(75.5)
    assert row["time_p99_us"] == pytest.approx(100)
    assert row["algbw_gb_s"] == row["busbw_gb_s"] == pytest.approx(1024 / 75.5e-6 / 1e9)


def test_percentiles_use_nearest_rank_method() -> None:
    assert measurement.nearest_rank([float(k) for k in range(1, 101)], 99) == 99
    assert measurement.nearest_rank([3.0, 1.0, 2.0], 99) == 3
    assert measurement.nearest_rank([5.0], 1) == 5


def turns(world: World) -> list[tuple[str, int]]:
    """(backend, calls in a row) of a run in which every call is noted."""
    world.init()
    bench.copy_rate = lambda ledger: 1.0
    noted: list[str] = []
    all_reduce = dist.all_reduce

    def noting(tensor: Any, op: Any, group: Any) -> None:
        noted.append(dist.get_backend(group))
        all_reduce(tensor, op, group)

    dist.all_reduce = noting
    with contextlib.redirect_stdout(io.StringIO()):
        given = "-b 64 -e 64 -n 25 -w 3 -c 0 --backend dscomm gloo".split()
        assert bench.main(given) == 0
    return [(name, len(list(calls))) for name, calls in itertools.groupby(noted)]


def test_backends_take_turns() -> None:
    [noted] = run_fresh(1, turns)
    # A trial each; the calls before; turns of ten samples and a first call that is none.
    each = [1, 3, 11, 11, 6]
    assert noted == [(name, calls) for calls in each for name in ("dscomm", "gloo")]


def events_of_touch(world: World) -> list[str]:
    world.init()
    noted: list[str] = []
    case.Case.touch = lambda self: noted.append("touch")
    dist.barrier = lambda *group: noted.append("meet")
    dist.all_reduce = lambda *given: noted.append("call")
    own = case.Case("all_reduce", 4, torch.float32, "sum", -1, dist.group.WORLD)
    options = flags.parse(["--touch"], 0, 1)
    from deepspeed_comm.bench.ledger import Ledger

    measurement.Measurement(options, {}, Ledger())._turn(own, 2)
    return noted


def test_buffer_is_rewritten_before_barrier_of_each_timed_call() -> None:
    [noted] = run_fresh(1, events_of_touch)
    assert noted == ["meet", "call"] + 2 * ["touch", "meet", "call"]


class Spoiling:
    """Makes one element wrong on rank 1, in one call of those that follow, or (None) in each."""

    def __init__(self, name: str, which: int | None) -> None:
        self.name, self.which = name, which

    def __call__(self, rank: int) -> None:
        original, numbers = getattr(dist, self.name), itertools.count()

        def spoilt(output: torch.Tensor, *rest: Any) -> None:
            original(output, *rest)
            number = next(numbers)
            if rank == 1 and self.which in (number, None):
                output[-1] += 1

        setattr(dist, self.name, spoilt)


# 0 tries whether the call is refused, 1 is checked, 2 comes before the samples, 3 begins the turn,
# 4 and 5 are timed, 6 is checked.
@pytest.mark.parametrize("which", [1, 2, 4, 5, 6, None])
def test_wrong_element_of_any_call_is_reported(which: int | None, tmp_path: Path) -> None:
    status, output = run_bench(
        "-b", "1K", "-e", "1K", *SHORT, "--json", str(tmp_path / "rows.json"),
        prepare=Spoiling("all_reduce", which),
    )  # fmt: skip
    assert status == 1, output
    [row] = rows_of(tmp_path / "rows.json")
    assert row["wrong"] >= 1
    assert f"# wrong elements: {row['wrong']} FAILED" in output


def test_wrong_element_of_broadcast_or_all_to_all_is_reported(tmp_path: Path) -> None:
    for name in ("broadcast", "all_to_all_single"):
        collective = name.replace("_single", "")
        status, output = run_bench(
            collective, "-b", "1K", "-e", "1K", *SHORT, prepare=Spoiling(name, 6)
        )
        assert status == 1 and "# wrong elements: 1 FAILED" in output, output


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_message_benchmarks_have_right_elements_and_bandwidths(ranks: int, tmp_path: Path) -> None:
    """Of an odd number of ranks the last one has nobody to play with."""
    status, output = run_bench(
        "send_recv", "ping_pong", "exchange", "-b", "8", "-e", "1M", "-f", "256", *SHORT,
        "--json", str(tmp_path / "rows.json"), ranks=ranks,
    )  # fmt: skip
    assert status == 0, output
    rows = rows_of(tmp_path / "rows.json")
    assert [row["collective"] for row in rows[::3]] == ["send_recv", "ping_pong", "exchange"]
    for row in rows:
        assert row["wrong"] == 0
        both_ways = 1 if row["collective"] == "send_recv" else 2
        assert row["busbw_gb_s"] == pytest.approx(both_ways * row["algbw_gb_s"])
        assert row["algbw_gb_s"] == pytest.approx(row["size_bytes"] / row["time_p50_us"] / 1e3)


class Losing:
    """The given call of recv on one rank takes the message and keeps the old data."""

    def __init__(self, rank: int, which: int) -> None:
        self.rank, self.which = rank, which

    def __call__(self, rank: int) -> None:
        original, numbers = dist.recv, itertools.count()

        def losing(tensor: torch.Tensor, *rest: Any) -> int:
            lost = next(numbers) == self.which and rank == self.rank
            return original(torch.empty_like(tensor) if lost else tensor, *rest)

        dist.recv = losing


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("which", [1, 6])  # the calls that are checked: see Spoiling
def test_lost_message_is_reported(rank: int, which: int, tmp_path: Path) -> None:
    status, output = run_bench(
        "ping_pong", "-b", "1K", "-e", "1K", *SHORT, prepare=Losing(rank, which)
    )
    assert status == 1 and "FAILED" in output, output


def test_run_without_checks_is_marked_as_unchecked(tmp_path: Path) -> None:
    status, output = run_bench(
        "-b", "1K", "-e", "1K", "-c", "0", *SHORT, "--json", str(tmp_path / "rows.json"),
        prepare=Spoiling("all_reduce", None),
    )  # fmt: skip
    assert status == 0 and "# no result was checked (-c 0)" in output and "N/A" in output
    assert rows_of(tmp_path / "rows.json")[0]["wrong"] is None


def test_inputs_differ_by_position_rank_and_seed() -> None:
    """Parts of inputs, at distances at which algorithms cut them, differ; so do ranks and seeds."""
    for op, world in (("sum", 2), ("sum", 3), ("sum", 64), ("sum", 500), ("prod", 2)):
        whole = case.values(0, 0, 1 << 19, op, world, 1)
        for distance in (1, 2, 64, 1 << 12, 1 << 16, 1 << 18):
            assert (whole[:1000] != whole[distance:][:1000]).sum() > 100, (op, world, distance)
        assert (whole[:1000] != case.values(1, 0, 1000, op, world, 1)).sum() > 100
        assert (whole[:1000] != case.values(0, 0, 1000, op, world, 2)).sum() > 100
        assert torch.equal(whole[5000:5100], case.values(0, 5000, 100, op, world, 1))


def test_results_fit_into_every_dtype() -> None:
    for world in (1, 2, 3, 7, 64, 127):
        for op in flags.OPS:
            total = case.reduced(0, 2000, op, world, 1)
            assert total.min() >= 0 and total.max() <= 127
    inputs = [case.values(rank, 10, 5, "sum", 3, 1) for rank in range(3)]
    assert case.reduced(10, 5, "sum", 3, 1).tolist() == sum(inputs).tolist()  # type: ignore[union-attr]
    assert case.reduced(10, 5, "max", 3, 1).tolist() == torch.stack(inputs).amax(0).tolist()


def test_json_csv_table_and_plot_have_same_figures(tmp_path: Path) -> None:
    importlib.import_module("matplotlib.figure")  # once, before ranks are forked
    names = [str(tmp_path / name) for name in ("rows.json", "rows.csv", "rows.png")]
    status, output = run_bench(
        "all_reduce", "barrier", "-b", "8", "-e", "1K", "-f", "4", *SHORT,
        "--backend", "dscomm", "gloo",
        "--json", names[0], "--csv", names[1], "--plot", names[2],
    )  # fmt: skip
    assert status == 0, output
    content = json.loads(Path(names[0]).read_text())
    assert content["world_size"] == 2 and content["options"]["iters"] == 2
    assert content["copy_gb_s"] == {"before": 1.0, "after": 1.0}
    rows = content["rows"]
    assert len(rows) == 2 * (4 + 1)
    with open(names[1], newline="") as file:
        as_text = [{name: str(value) for name, value in row.items()} for row in rows]
        assert list(csv.DictReader(file)) == as_text
    # The table's lines hold the same figures.
    lines = [line.split() for line in output.splitlines() if not line.startswith("#")]
    assert [(int(cells[0]), cells[10]) for cells in lines] == [
        (row["size_bytes"], row["backend"]) for row in rows
    ]
    # Only the second of two backends is compared, with the row before it.
    ratios = [rows[k]["time_p50_us"] / rows[k - 1]["time_p50_us"] for k in range(1, len(rows), 2)]
    assert [cells[11:] for cells in lines[0::2]] == [[]] * len(ratios)
    assert [cells[11:] for cells in lines[1::2]] == [[f"{each:.2f}", "x"] for each in ratios]
    assert "  backend        vs dscomm\n" in output
    mean = statistics.geometric_mean(ratios[:4])
    assert (
        f"# all_reduce: gloo takes {mean:.2f} x the time of dscomm (geometric mean of 4, " in output
    )
    of_dscomm = [row["busbw_gb_s"] for row in rows[0:8:2]]
    assert f"# Avg bus bandwidth    : {statistics.fmean(of_dscomm):.4f}  dscomm\n" in output
    assert [float(cells[5]) for cells in lines] == [round(row["time_p50_us"], 2) for row in rows]
    assert Path(names[2]).read_bytes().startswith(b"\x89PNG")

    every = [measurement.Row(**row) for row in rows]
    figure = plot.draw(every, "dscomm", "two ranks, here")
    time, beside, of_barrier, barriers = figure.axes
    assert (time.get_xscale(), time.get_yscale()) == ("log", "log")
    lines_of = {line.get_label(): line for line in time.get_lines()}
    assert set(lines_of) == {"dscomm", "gloo"}
    assert lines_of["dscomm"].get_color() != lines_of["gloo"].get_color()
    of_gloo = [row["time_p50_us"] for row in rows if row["backend"] == "gloo"]
    assert list(lines_of["gloo"].get_ydata()) == of_gloo[:4]
    [_, speed_up] = beside.get_lines()  # the first is where both take as long
    assert list(speed_up.get_ydata()) == ratios[:4] and speed_up.get_label() == "gloo"
    assert [text.get_text() for text in time.get_xticklabels()] == [
        *("8 B", "16 B", "32 B", "64 B", "128 B", "256 B", "512 B")
    ]
    assert len(of_barrier.get_lines()) == 2 and len(barriers.get_lines()) == 2

    # Against the first of the flags, also where another one's row comes first.
    turned = plot.draw(every[::-1], "dscomm")
    assert list(turned.axes[3].get_lines()[1].get_ydata()) == ratios[:4]
    assert report.footer(every[::-1], "dscomm") != report.footer(every, "gloo")

    alone = plot.draw([row for row in every if row.backend == "dscomm"], "dscomm")
    assert [list(line.get_ydata()) for line in alone.axes[1].get_lines()] == [of_dscomm]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("all_reduse", "no collective 'all_reduse': expected all, all_reduce"),
        ("-b 12X", "expected bytes such as 8, 64K, 16M or 1G, got '12X'"),
        ("-b 0", "expected bytes"),
        ("-b 2K -e 1K", "-b/--minbytes 2048 is above -e/--maxbytes 1024"),
        ("-b 8 -e 1G -i 4", "more than 10000 sizes"),
        ("-i 4 -f 2", "not allowed with argument"),
        ("-f 1", "expected a whole number from 2 on, got '1'"),
        ("-n 0", "expected a whole number from 1 on, got '0'"),
        ("-n many", "expected a whole number from 1 on, got 'many'"),
        ("-o median", "invalid choice: 'median'"),
        ("-d complex64", "expected all or one of int8,"),
        ("-o avg -d int8", "-o avg of int8 has no meaning"),
        ("-r 2", "rank 2 must be below 2, the number of ranks"),
        ("--backend gloo all_reduce", "put all_reduce before --backend"),
        ("--backend smoke", "torch knows no backend 'smoke'"),
        ("--direct --backend gloo", "--direct needs all_reduce or ping_pong, and dscomm in"),
        ("--direct barrier", "--direct needs all_reduce or ping_pong, and dscomm in"),
        ("--touch -m 2", "--touch rewrites the tensors before each timed call"),
        ("--nonsense", "unrecognized arguments: --nonsense"),
    ],
)
def test_wrong_flags_are_reported_by_rank_0_alone(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        with pytest.raises(SystemExit) as ended:
            flags.parse(arguments.split(), rank, 2)
        assert ended.value.code == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.count("\n") == (rank == 0)
        assert (message in output.err) == (rank == 0), output.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--json", "nowhere/at/all.json"), "nowhere/at/all.json: its folder must exist"),
        (("--plot", "figure.bmp"), "expected a name that ends in .png, got figure.bmp"),
        (("-b", "1", "-e", "3"), "no size has an element for every rank"),
    ],
)
def test_unusable_path_or_size_ends_all_ranks_before_measuring(
    arguments: tuple[str, ...], message: str
) -> None:
    status, output = run_bench(*arguments)
    assert status == 2
    assert message in output and output.count("\n") == 1


def test_help_on_rank_0_lists_flags_of_nccl_tests(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        with pytest.raises(SystemExit) as ended:
            flags.parse(["--help"], rank, 2)
        assert ended.value.code == 0
        output = capsys.readouterr().out
        for flag in ("-b", "--stepfactor", "--warmup_iters", "--datatype", "--root", "--touch"):
            assert (flag in output) == (rank == 0)


def test_flags_give_sizes_dtypes_and_ops() -> None:
    def sizes(text: str) -> list[int]:
        return flags.parse(text.split(), 0, 2).sizes

    assert sizes("-b 8 -e 64") == [8, 16, 32, 64]
    assert sizes("-b 8 -e 1K -f 8") == [8, 64, 512]
    assert sizes("-b 1k -e 4K -i 1K") == [1024, 2048, 3072, 4096]
    assert sizes("-b 64M") == [64 << 20]
    assert sizes("")[-1] == 16 << 20
    assert flags.parse(["-d", "float16"], 0, 2).dtypes == ["half"]
    assert flags.parse(["all", "-r", "all"], 0, 2).root is None
    # "all" leaves out avg for integer dtypes.
    options = flags.parse(["-o", "all", "-d", "all"], 0, 2)
    means = [each.dtype for each in plan.settings(options, 2) if each.op == "avg"]
    assert means == ["half", "float", "double", "bfloat16"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("has_rich", [True, False])
def test_terminal_shows_lines_with_and_without_rich(
    has_rich: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_rich:
        pytest.importorskip("rich", reason="rich is not installed: pip install rich")
    else:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    with report.progress(0, 2) as (step_done, tell):
        tell("# [first]")
        step_done()
        step_done()
        tell("# last")
    assert ("100%" in terminal.getvalue()) == has_rich
    assert "# [first]" in terminal.getvalue() and "# last" in terminal.getvalue()


def test_copy_rate_is_positive() -> None:
    assert all(rate > 0 for rate in run_fresh(2, rate_of_copies)[:1])


def rate_of_copies(world: World) -> float:
    from deepspeed_comm.bench.ledger import Ledger

    world.init()
    return measurement.copy_rate(Ledger())


def started(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *command],
        env=dict(os.environ, OMP_NUM_THREADS="1", **environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_bench_without_launcher_is_world_of_one() -> None:
    result = started("deepspeed_comm.bench", "all", "-b", "64", "-e", "64", *SHORT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "# 1 rank, torch" in result.stdout
    refused = [line for line in result.stdout.splitlines() if "cannot run" in line]
    assert refused == [
        f"# dscomm cannot run {name} here (type float, redop none): "
        f"ValueError: {name} needs two ranks or more"
        for name in ("send_recv", "ping_pong", "exchange")
    ]
    assert "GB/s after" in result.stdout and "# wrong elements: 0 OK" in result.stdout


def test_bench_under_torchrun_prints_one_table(tmp_path: Path) -> None:
    # Debian's torchrun on Python 3.11 stumbles over its own defaults of redirects and tee.
    launcher = ("torch.distributed.run", "--standalone", "--nproc_per_node=2", "--redirects=9:0",
                "--tee=9:0", "-m", "deepspeed_comm.bench")  # fmt: skip
    result = started(*launcher, "-b", "1K", "-e", "2K", *SHORT, "--csv", str(tmp_path / "rows.csv"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("# 2 ranks, torch") == 1
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 3


def test_wrong_flag_ends_lone_rank_1_silently() -> None:
    result = started("deepspeed_comm.bench", "-o", "median", RANK="1", WORLD_SIZE="2")
    assert result.returncode == 2 and result.stdout == result.stderr == ""
