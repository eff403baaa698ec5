"""The files that ranks write when a group fails or on a signal, and torch's analyser for them."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_comm import flight_record
from tests.cases.rank_processes import TORCH_2, Job, World

RANKS = 2


def _read(folder: Path) -> dict[int, dict[str, Any]]:
    assert [path.name for path in folder.iterdir() if path.suffix != ".json"] == []
    return flight_record.read_folder(folder)


def _analyse(folder: Path, *options: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed_comm.flight_record", str(folder), *options],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def _fails(world: World, folder: str, how: str) -> str:
    os.environ["DSCOMM_FLIGHT_RECORD_DIR"] = folder
    os.environ["DSCOMM_RECORDER_ENTRIES"] = "8"
    world.init(timeout_s=30 if TORCH_2 or how != "timeout" else 4)
    group = dist.new_group()
    if how == "timeout" and TORCH_2:
        dist.group.WORLD.set_timeout(timedelta(seconds=0.5))
    parts = [torch.ones(2) for _ in range(world.size)]
    for _ in range(4):  # more than are kept
        dist.barrier(group=group)
        dist.all_reduce(torch.ones(5), async_op=True).wait()
        dist.all_gather(parts, torch.ones(2))
        dist.reduce_scatter(torch.ones(2), parts)
    assert not Path(folder).exists() or list(Path(folder).iterdir()) == []  # no error yet
    if world.rank == 1:
        if how == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "timeout":
            world.hear()  # until the other rank has timed out
    count = 7 if how == "mismatch" and world.rank == 1 else 6
    try:
        dist.all_reduce(torch.ones(count))
    except RuntimeError as error:
        world.say("raised")
        return str(error)
    raise AssertionError("nothing raised")


@pytest.mark.parametrize("how", ["mismatch", "timeout", "death"])
def test_failure_writes_a_record_on_each_living_rank(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "records"  # the ranks make it
    with Job(RANKS, _fails, str(folder), how) as job:
        if how == "timeout":
            job.wait_for("raised", [0])
            job.tell("go", [1])
        job.finish()
        living = [0] if how == "death" else [0, 1]
        for rank in living:
            assert job.first(rank, "returned") is not None, job.report()
            assert "the flight record is in" in job.output(rank)
        records = _read(folder)
    assert list(records) == living
    for rank, record in records.items():
        assert record["version"] == "2.10"
        assert {name: each["ranks"] for name, each in record["pg_config"].items()} == {
            "0": "[0, 1]",
            **{name: "[0, 1]" for name in record["pg_config"]},
        }
        last = record["entries"][-1]
        # All calls of torch 1.13 are asynchronous: one in a group that has ended is refused before
        # it is recorded.
        refused = how == "timeout" and rank == 1 and not TORCH_2
        if refused:
            assert last["profiling_name"] == "gloo:reduce_scatter" and last["state"] == "completed"
        else:
            assert last["profiling_name"] == "gloo:all_reduce" and last["state"] == "started"
            assert last["input_sizes"] == [[7 if how == "mismatch" and rank == 1 else 6]]
        assert record["pg_status"]["0"]["last_enqueued_collective"] == last["collective_seq_id"]
        assert record["dscomm"]["failures"]["0"] in record["dscomm"]["reason"]
        text = {"mismatch": "called different things", "timeout": "timed out", "death": "died"}[how]
        assert text in record["dscomm"]["reason"]
        assert sum(entry["process_group"][0] == "0" for entry in record["entries"]) == 8


@pytest.mark.skipif(not TORCH_2, reason="torch 1.13 has no analyser")
def test_torch_analyser_finds_the_mismatch(tmp_path: Path) -> None:
    with Job(RANKS, _fails, str(tmp_path), "mismatch") as job:
        job.finish()
        assert len(_read(tmp_path)) == RANKS, job.report()
    code, text = _analyse(tmp_path)
    assert code == 0, text
    assert "called different things as call" in text
    assert "Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH" in text, text
    assert "Not all ranks joining collective" not in text, text
    assert text.count("has errors") == 1, text
    code, text = _analyse(tmp_path, "-j")
    if importlib.util.find_spec("tabulate") is None:
        assert code == 1 and "pip install tabulate" in text, text
    else:
        assert code == 0 and "all_reduce(input_sizes=[[7]], state=started)" in text, text


@pytest.mark.skipif(not TORCH_2, reason="torch 1.13 has no analyser")
def test_torch_analyser_names_the_missing_record(tmp_path: Path) -> None:
    with Job(RANKS, _fails, str(tmp_path), "death") as job:
        job.finish()
    code, text = _analyse(tmp_path)
    assert code == 1 and "Missing dump files from ranks {1}" in text, text
    code, text = _analyse(tmp_path, "--allow-incomplete-ranks")
    assert code == 0 and "rank 1 (pid" in text, text
    code, text = _analyse(tmp_path / "elsewhere")
    assert code == 1 and "No such file" in text, text


def _on_signal(world: World, folder: str) -> None:
    os.environ["DSCOMM_FLIGHT_RECORD_DIR"] = folder
    os.environ["DSCOMM_FLIGHT_RECORD_SIGNAL"] = "SIGUSR2"
    world.init()
    dist.barrier()
    work = dist.irecv(torch.ones(3), 1, tag=5) if world.rank == 0 else None
    world.say("ready")
    if world.rank == 1:
        world.hear()
    dist.all_reduce(torch.ones(3))  # the signal comes while rank 0 waits in it
    if work is None:
        dist.send(torch.ones(3), 0, tag=5)
    else:
        work.wait()
    pid = os.fork()
    if pid == 0:
        os.kill(os.getpid(), signal.SIGUSR2)  # ends a child, by the default action
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGUSR2
    dist.destroy_process_group()


def _await_files(folder: Path, count: int) -> None:
    end = time.monotonic() + 20
    while len(list(folder.glob("*.json"))) < count and time.monotonic() < end:
        time.sleep(0.01)


def test_signal_writes_the_record_of_a_waiting_rank(tmp_path: Path) -> None:
    with Job(RANKS, _on_signal, str(tmp_path)) as job:
        job.wait_for("ready")
        for rank in range(RANKS):
            job.kill(rank, signal.SIGUSR2)
        _await_files(tmp_path, RANKS)
        job.tell("go", [1])
        job.results()
    records = _read(tmp_path)
    assert [record["dscomm"]["reason"] for record in records.values()] == ["SIGUSR2"] * RANKS
    assert [len(record["entries"]) for record in records.values()] in ([2, 1], [1, 1])
    (message,) = records[0]["dscomm"]["messages"]
    assert message["dscomm"]["title"] == "recv" and message["dscomm"]["tag"] == 5
    assert message["time_completed_ns"] is None
    assert json.dumps(records[1]["dscomm"]["failures"]) == '{"0": null}'


def test_signal_handler_of_the_program_is_kept(tmp_path: Path) -> None:
    with Job(1, _on_signal_alone, str(tmp_path)) as job:
        assert job.results() == ["heard"]
        assert "SIGUSR2 has a handler or is ignored" in job.output(0)
    assert list(tmp_path.iterdir()) == []


def _on_signal_alone(world: World, folder: str) -> str:
    os.environ["DSCOMM_FLIGHT_RECORD_DIR"] = folder
    os.environ["DSCOMM_FLIGHT_RECORD_SIGNAL"] = "SIGUSR2"
    heard = []
    signal.signal(signal.SIGUSR2, lambda *_: heard.append(True))
    world.init()
    os.kill(os.getpid(), signal.SIGUSR2)
    return "heard" if heard else ""


def _asks_for_the_signal_alone(world: World) -> str:
    os.environ["DSCOMM_FLIGHT_RECORD_SIGNAL"] = "SIGUSR2"
    try:
        world.init()
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def test_signal_without_a_folder_is_refused() -> None:
    with Job(1, _asks_for_the_signal_alone) as job:
        (text,) = job.results()
    assert "DSCOMM_FLIGHT_RECORD_SIGNAL=SIGUSR2: expected DSCOMM_FLIGHT_RECORD_DIR" in text


def _cannot_write(world: World, folder: str) -> str:
    Path(folder, f"flight_record_{world.rank}.json").mkdir()
    return _fails_at_once(world, folder)


def _fails_at_once(world: World, folder: str) -> str:
    os.environ["DSCOMM_FLIGHT_RECORD_DIR"] = folder
    world.init()
    dist.barrier()
    try:
        dist.all_reduce(torch.ones(world.rank + 3))
    except RuntimeError as error:
        return str(error)
    return ""


def test_record_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    with Job(RANKS, _cannot_write, str(tmp_path)) as job:
        for text in job.results():
            assert "called different things" in text
        for rank in range(RANKS):
            assert "no flight record: " in job.output(rank), job.report()
    assert not list(tmp_path.glob("*.tmp"))


def test_align_keeps_common_entries_of_each_group() -> None:
    def entries(*numbers: tuple[str, int]) -> dict[str, Any]:
        made = [
            {"process_group": [g, ""], "collective_seq_id": n, "record_id": 9} for g, n in numbers
        ]
        return {"entries": made}

    records = {
        0: entries(("a", 1), ("a", 2), ("b", 5), ("a", 3)),
        1: entries(("b", 4), ("b", 5), ("a", 2), ("a", 3)),
    }
    flight_record.align(records)
    kept = {
        rank: [(e["process_group"][0], e["collective_seq_id"]) for e in record["entries"]]
        for rank, record in records.items()
    }
    assert kept == {0: [("a", 2), ("b", 5), ("a", 3)], 1: [("b", 5), ("a", 2), ("a", 3)]}
    assert [e["record_id"] for e in records[0]["entries"]] == [0, 1, 2]
