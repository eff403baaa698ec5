"""The figure of a saved log."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_comm.comms_log import files, plot
from deepspeed_comm.comms_logging import CommsLogger


def saved(folder: Path) -> Path:
    """A log of two ranks, of which the second one is slower."""
    everyones = []
    for rank in range(2):
        log = CommsLogger()
        for size in (8, 1024, 1 << 20):
            log.append("all_reduce", "all_reduce", (1.0 + rank) * size / 1024, size, 2)
        log.append("barrier", "barrier", 0.5, 0, 2)
        log.append("broadcast", "broadcast", 1.0, 4096, 2)
        everyones.append(files.own_log(log.get_summary()))
    files.write_log(everyones, folder / "log.json", None)
    return folder / "log.json"


def test_curves_have_minimum_median_and_maximum_of_ranks(tmp_path: Path) -> None:
    curves = plot.curves(plot.read_records(saved(tmp_path)), "p50_latency_ms")
    assert list(curves) == ["all_reduce", "barrier", "broadcast"]
    assert curves["all_reduce"] == [
        (size, size / 1024, 1.5 * size / 1024, 2.0 * size / 1024) for size in (8, 1024, 1 << 20)
    ]


def test_figure_shows_latency_and_bandwidth_of_each_operation(tmp_path: Path) -> None:
    log = saved(tmp_path)
    figure = plot.draw(plot.read_records(log))
    latency, bandwidth = figure.axes
    assert latency.get_xscale() == latency.get_yscale() == bandwidth.get_yscale() == "log"
    assert [text.get_text() for text in latency.get_xticklabels()][:2] == ["8 B", "64 B"]
    lines = {line.get_label(): line for line in latency.get_lines()}
    assert set(lines) == {"all_reduce", "barrier (no data)", "broadcast"}
    assert list(lines["all_reduce"].get_xdata()) == [8, 1024, 1 << 20]
    assert list(lines["all_reduce"].get_ydata()) == [1.5 / 128, 1.5, 1536]
    assert {line.get_label() for line in bandwidth.get_lines()} == {"all_reduce", "broadcast"}
    for name, beginning in (("figure.png", b"\x89PNG"), ("figure.svg", b"<?xml")):
        plot.main([str(log), str(tmp_path / name)])
        assert (tmp_path / name).read_bytes().startswith(beginning)
    files.write_log([files.own_log({})], tmp_path / "empty.json", None)
    plot.main([str(tmp_path / "empty.json"), str(tmp_path / "empty.png")])


def test_invalid_log_or_format_is_named(tmp_path: Path) -> None:
    log, figure = saved(tmp_path), tmp_path / "figure.png"
    for text in (
        "rank,operation\n",
        "[]",
        '{"records": 1}',
        '{"records": [{}]}',
        '{"other": []}',
        "\xff",
    ):
        (tmp_path / "other").write_text(text, encoding="latin-1")
        with pytest.raises(SystemExit, match="dscomm plot: .*other was not written by save_log"):
            plot.main([str(tmp_path / "other"), str(figure)])
    with pytest.raises(SystemExit, match="dscomm plot: .*No such file"):
        plot.main([str(tmp_path / "none.json"), str(figure)])
    with pytest.raises(SystemExit, match="dscomm plot: Format 'nonsense' is not supported"):
        plot.main([str(log), str(tmp_path / "figure.nonsense")])
    assert not figure.exists()


def test_plot_without_matplotlib_names_the_package(tmp_path: Path) -> None:
    """Only the figure needs it, and says so."""
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import deepspeed_comm; deepspeed_comm.all_reduce\n"
        "from deepspeed_comm.comms_log import plot; plot.main(sys.argv[1:])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(saved(tmp_path)), str(tmp_path / "figure.png")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 1
    assert "dscomm plot: a figure of the log needs matplotlib: pip install" in result.stderr
