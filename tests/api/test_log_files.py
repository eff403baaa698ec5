"""Files of the log: what all ranks logged in one file, or none."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed_comm as dist
from deepspeed_comm.comms_log import files
from tests.cases.deepspeed_groups import BACKENDS, init
from tests.cases.harness import World, run_fresh

SIZES = [4, 400, 40_000]  # bytes


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Of a file of either kind, with numbers for numbers."""
    with open(path, newline="") as file:
        if path.suffix == ".json":
            return list(json.load(file)["records"])
        rows = list(csv.DictReader(file))
    assert all(list(row) == list(files.COLUMNS) for row in rows)
    kinds: dict[str, type] = {"rank": int, "operation": str, "msg_size_bytes": int, "count": int}
    return [{key: kinds.get(key, float)(value) for key, value in row.items()} for row in rows]


def _files(world: World, backend: str) -> None:
    init(world, backend)
    dist.configure(enabled=True)
    for size in SIZES:
        for _ in range(5):
            dist.all_reduce(torch.ones(size // 4))
    dist.barrier()
    # Ranks may log different calls, under names that a table must hold as they are.
    dist.broadcast(torch.ones(3), 0, log_name=f'mine, of "rank {world.rank}"')
    dist.configure(enabled=False)
    folder = Path(world.folder)
    dist.save_log(folder / "log.json")
    dist.save_log(str(folder / "log.csv"))
    dist.save_log(folder / "table", format="csv")  # what is given goes before the name
    assert dist.get_comm_operation_count() == 17  # a file of the log is not logged

    rows = rows_of(folder / "log.json")
    assert rows == rows_of(folder / "log.csv")
    assert (folder / "log.csv").read_bytes() == (folder / "table").read_bytes()
    content = json.loads((folder / "log.json").read_text())
    assert content["world_size"] == world.size == len(content["hosts"])
    own = [row for row in rows if row["rank"] == world.rank]
    assert [(row["operation"], row["msg_size_bytes"], row["count"]) for row in own] == [
        *(("all_reduce", size, 5) for size in SIZES),
        ("barrier", 0, 1),
        (f'mine, of "rank {world.rank}"', 12, 1),
    ]
    summary = dist.log_summary(return_dict=True)
    assert summary is not None
    for row in own:  # as log_summary() has it
        told = summary["summary"][row["operation"]][row["msg_size_bytes"]]
        assert {key: told[key] for key in files.COLUMNS[2:]} == {
            key: row[key] for key in files.COLUMNS[2:]
        }

    # Every rank gets the error of the one that writes, and what was there stays.
    for path, message in (
        (folder / "log.txt", "rank 0 could not write .*log.txt: ValueError: format 'txt' is not"),
        (folder / "none" / "log.csv", "rank 0 could not write .*: FileNotFoundError"),
        (folder, "rank 0 could not write .*: ValueError: format ''"),
    ):
        with pytest.raises(RuntimeError, match=message):
            dist.save_log(path)
    dist.barrier()
    assert rows == rows_of(folder / "log.json")
    dist.reset_log()
    dist.save_log(folder / "log.json")
    assert rows_of(folder / "log.json") == []
    # Nothing is left of what was not finished.
    left = {name for name in os.listdir(folder) if "log" in name or "table" in name}
    assert left == {"log.json", "log.csv", "table"}
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", BACKENDS)
def test_saved_json_and_csv_match_summary(backend: str) -> None:
    run_fresh(2, _files, backend)


def test_file_is_replaced_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text("before")
    with pytest.raises(ZeroDivisionError), files.replaced_when_complete(path) as file:
        file.write("half of it")
        file.flush()
        assert path.read_text() == "before"
        raise ZeroDivisionError
    assert path.read_text() == "before" and os.listdir(tmp_path) == ["log.json"]
    with files.replaced_when_complete(path) as file:
        file.write("after")
    assert path.read_text() == "after" and os.listdir(tmp_path) == ["log.json"]
