#!/usr/bin/env python3
"""Draws the pictures of docs/design.md. Edit the functions below, then run:

docs/pictures/draw.py            writes the SVG files beside this program
docs/pictures/draw.py FOLDER     writes them into a folder

The output depends on nothing but this file, so a test compares it with the committed files.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from html import escape
from pathlib import Path

WIDTH = 800  # as wide as a page, so that text keeps its size
INK, GREY, PAPER = "#1c2733", "#5b6876", "#ffffff"
BLUE, ORANGE, GREEN, VIOLET = "#dcebfa", "#fde6cd", "#dcf1dd", "#ece3f7"
BLUE_INK, ORANGE_INK, GREEN_INK, VIOLET_INK = "#1f5f9e", "#a4560a", "#2a7331", "#6a3fa0"


class Picture:
    def __init__(self, title: str, height: int) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" '
            'font-family="DejaVu Sans, Verdana, Helvetica, Arial, sans-serif">',
            f"<title>{escape(title)}</title>",
            "<defs>",
            *(
                f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
                f'markerHeight="7" orient="auto-start-reverse">'
                f'<path d="M0 0 L10 5 L0 10 z" fill="{color}"/></marker>'
                for name, color in (
                    ("ink", GREY),
                    ("blue", BLUE_INK),
                    ("orange", ORANGE_INK),
                    ("violet", VIOLET_INK),
                )
            ),
            "</defs>",
            f'<rect width="{WIDTH}" height="{height}" fill="{PAPER}"/>',
        ]

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str = PAPER,
        stroke: str = GREY,
        dash: str = "",
    ) -> None:
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" '
            f'fill="{fill}" stroke="{stroke}"{dashed}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 13,
        anchor: str = "start",
        color: str = INK,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{color}"{weight}>{escape(words)}</text>'
        )

    def paragraph(
        self, x: float, y: float, lines: list[str], size: int = 13, color: str = INK
    ) -> None:
        for number, line in enumerate(lines):
            self.text(x, y + (size + 7) * number, line, size, color=color)

    def layer(
        self, x: float, y: float, width: float, name: str, lines: list[str], fill: str = PAPER
    ) -> float:
        """A box with a name and lines below it. Returns its lower edge."""
        height = 28 + 17 * len(lines)
        self.box(x, y, width, height, fill)
        self.text(x + 10, y + 19, name, bold=True)
        for number, line in enumerate(lines):
            self.text(x + 10, y + 37 + 17 * number, line, 12)
        return y + height

    def arrow(
        self,
        x1: float,
        y1: float,
        x2: float,
        y2: float,
        color: str = GREY,
        marker: str = "ink",
        both: bool = False,
        dash: str = "",
    ) -> None:
        start = f' marker-start="url(#{marker})"' if both else ""
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        self.parts.append(
            f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" fill="none" stroke="{color}" '
            f'stroke-width="1.5"{dashed}{start} marker-end="url(#{marker})"/>'
        )

    def svg(self) -> str:
        return "\n".join([*self.parts, "</svg>", ""])


def architecture() -> str:
    picture = Picture("The layers of dscomm, from Python to memory and the network", 710)
    left, right, full = 20, 420, 760
    picture.layer(
        left,
        15,
        full,
        "Your program",
        [
            "torch.distributed, DeepSpeed, DDP, FSDP",
        ],
        GREEN,
    )
    picture.arrow(400, 60, 400, 78)
    picture.layer(
        left,
        80,
        full,
        "deepspeed_comm (Python)",
        ["the hook that torch calls, the API of deepspeed.comm, doctor, bench, demo"],
        GREEN,
    )
    picture.arrow(400, 125, 400, 143)
    picture.layer(
        left,
        145,
        full,
        "csrc/torch: the c10d glue",
        ["checks arguments; turns tensors into plain memory, and a Status into an exception"],
        GREEN,
    )
    picture.box(10, 203, 780, 342, "#f5f8fb", GREY, "5 4")
    picture.arrow(220, 190, 220, 225)
    picture.arrow(400, 258, 418, 258)
    picture.text(782, 219, "csrc/core: no torch, no MPI, no Python", 12, "end", GREY)
    picture.layer(
        left,
        227,
        380,
        "engine",
        ["one Group for each c10d group: its queue,", "workers, flight recorder"],
        BLUE,
    )
    picture.layer(
        right,
        227,
        360,
        "formation",
        ["how the ranks of a group find each other,", "and which Team they get"],
        BLUE,
    )
    picture.arrow(120, 289, 120, 318)
    picture.arrow(340, 289, 450, 318)
    picture.layer(
        left,
        320,
        380,
        "team: nine collectives on plain memory",
        ["HierarchicalTeam combines Teams:", "first inside a domain, then across domains"],
        BLUE,
    )
    picture.layer(
        right,
        320,
        360,
        "messages: send and recv",
        ["channels, matching, progress", "(they bypass the queue of the group)"],
        BLUE,
    )
    picture.arrow(120, 382, 120, 447)
    picture.arrow(340, 382, 450, 447)
    picture.arrow(450, 382, 340, 447)
    picture.arrow(520, 382, 520, 447)
    picture.layer(
        left,
        449,
        380,
        "shm: ShmTeam, ranks of one host",
        ["arena, mailboxes, the wait, staging;", "one file for each collective"],
        BLUE,
    )
    picture.layer(
        right,
        449,
        175,
        "transport",
        ["interface between", "hosts"],
        BLUE,
    )
    picture.layer(
        605,
        449,
        175,
        "detector",
        ["deaths, departures,", "failed Teams"],
        BLUE,
    )
    picture.text(
        left + 110,
        534,
        "Used by all: reduce (arithmetic), topology, types, store, base",
        12,
        color=GREY,
    )
    picture.arrow(507, 511, 507, 563)
    picture.arrow(692, 511, 692, 648)
    picture.layer(
        right, 565, 175, "csrc/mpi: MpiTeam", ["loaded by the first", "group across hosts"], ORANGE
    )
    picture.arrow(507, 627, 507, 648)
    picture.arrow(120, 511, 120, 648)
    picture.layer(
        left, 650, 380, "Shared memory", ["one sealed memfd in each process: the arena"], VIOLET
    )
    picture.layer(right, 650, 175, "Open MPI or MPICH", ["TCP, UCX, libfabric"], VIOLET)
    picture.layer(605, 650, 175, "TCP connections", ["of the failure detector"], VIOLET)
    return picture.svg()


def all_reduce() -> str:
    """The order of steps is that of ShmTeam::all_reduce_chunked()."""
    picture = Picture("A 1 MiB all-reduce between two ranks of one host, in time", 535)
    # The tensor: chunks of two slices.
    picture.text(
        20, 28, "The tensor: 1 MiB = 4 chunks of 256 KiB; each chunk = 2 slices", bold=True
    )
    for chunk in range(4):
        x = 20 + 190 * chunk
        picture.box(x, 40, 90, 30)
        picture.box(x + 90, 40, 90, 30, "#eef1f4")
        picture.text(x + 45, 59, "slice 0", 12, "middle")
        picture.text(x + 135, 59, "slice 1", 12, "middle")
        picture.text(x + 90, 86, f"chunk {chunk}", 12, "middle", GREY)
    picture.text(20, 112, "Rank 0 reduces every slice 0, rank 1 reduces every slice 1.", 13)

    # The steps of either rank, with the phase that each posts.
    steps = [
        ("S", 0, 1), ("S", 1, 2), ("R", 0, 3), ("S", 2, 4), ("R", 1, 5), ("G", 0, 0),
        ("S", 3, 6), ("R", 2, 7), ("G", 1, 0), ("R", 3, 8), ("G", 2, 0), ("G", 3, 0),
    ]  # fmt: skip
    fills = {"S": VIOLET, "R": ORANGE, "G": GREEN}
    width, first, lanes = 57, 92, {0: 175, 1: 275}
    at = {(kind, chunk): first + width * number for number, (kind, chunk, _) in enumerate(steps)}
    picture.text(first, 150, "time", 12, color=GREY)
    picture.arrow(first + 38, 146, 776, 146)
    for rank, y in lanes.items():
        picture.text(20, y + 24, f"rank {rank}", 13, bold=True)
        for kind, chunk, phase in steps:
            x = at[kind, chunk]
            picture.box(x, y, width - 5, 38, fills[kind])
            picture.text(x + (width - 5) / 2, y + 24, f"{kind}{chunk}", 13, "middle", bold=True)
            if phase:
                above = rank == 0
                picture.text(
                    x + (width - 5) / 2,
                    y - 6 if above else y + 53,
                    f"post {phase}",
                    11,
                    "middle",
                    GREY,
                )
    # What each waits for, shown for the first chunk. The pairs run both ways.
    for kind, next_kind, color, marker in (
        ("S", "R", VIOLET_INK, "violet"),
        ("R", "G", ORANGE_INK, "orange"),
    ):
        x1, x2 = at[kind, 0] + width - 8, at[next_kind, 0] + 6
        picture.arrow(x1, 214, x2, 273, color, marker)
        picture.arrow(x1, 274, x2, 215, color, marker)
    picture.text(366, 249, "Arrows: the wait for the peer's post, for chunk 0", 12, color=GREY)

    rows = [
        (
            358,
            "S",
            ["Stage chunk k: copy the slice that the peer reduces from the tensor to staging."],
        ),
        (
            385,
            "R",
            [
                "Reduce chunk k: wait for the peer's Sk; add its staged slice and this rank's,",
                "in rank order; write the result to the tensor and to staging.",
            ],
        ),
        (432, "G", ["Gather chunk k: wait for the peer's Rk; copy its result from its staging."]),
    ]
    for y, kind, lines in rows:
        picture.box(20, y - 15, 30, 22, fills[kind])
        picture.text(35, y + 1, f"{kind}k", 13, "middle", bold=True)
        picture.paragraph(60, y, lines)
    picture.paragraph(
        20,
        475,
        [
            "Chunk 1 is staged before chunk 0 is reduced; a result is gathered one chunk later.",
            "So both ranks find most posts already there, and wait little. No closing barrier: a",
            "staging buffer is reused when the mailbox of its reader shows that it has been read.",
        ],
    )
    return picture.svg()


def hosts() -> str:
    picture = Picture("The Teams of a group of six ranks on three hosts", 520)
    xs = [20, 285, 550]
    picture.text(
        20,
        28,
        "A group of 6 ranks on 3 hosts: a HierarchicalTeam, one domain for each host",
        bold=True,
    )
    for host, x in enumerate(xs):
        picture.box(x, 45, 230, 240, "#f5f8fb")
        picture.text(x + 12, 67, f"host {host}", bold=True)
        picture.box(x + 15, 80, 200, 190, BLUE, BLUE_INK, "5 4")
        picture.text(x + 115, 172, "inner Team: ShmTeam", 12, "middle", BLUE_INK)
        picture.text(x + 115, 188, "(shared memory)", 12, "middle", BLUE_INK)
        for local in range(2):
            y = 92 + 118 * local
            picture.box(x + 65, y, 100, 46)
            picture.text(x + 115, y + 20, f"rank {2 * host + local}", 13, "middle", bold=True)
            picture.text(x + 115, y + 37, f"leads slice {local}", 11, "middle", GREY)
    for slice_, color, marker in ((0, ORANGE_INK, "orange"), (1, VIOLET_INK, "violet")):
        y = 115 + 118 * slice_
        for one, other in itertools.pairwise(xs):
            picture.arrow(one + 165, y, other + 65, y, color, marker, both=True)
    picture.text(20, 312, "outer Team of slice 0: MpiTeam of ranks 0, 2, 4", 13, color=ORANGE_INK)
    picture.text(20, 332, "outer Team of slice 1: MpiTeam of ranks 1, 3, 5", 13, color=VIOLET_INK)
    picture.text(
        20,
        352,
        "direct Team: MpiTeam of all ranks, for gather, scatter and all-to-all",
        13,
        color=GREY,
    )

    picture.text(20, 388, "All-reduce", bold=True)
    steps = [
        (BLUE, "Reduce-scatter in each host: local rank k gets its host's sum of slice k."),
        (
            ORANGE,
            "All-reduce between hosts, one for each slice: all ranks of a host use the network.",
        ),
        (BLUE, "All-gather in each host: every rank gets both slices."),
    ]
    for number, (fill, line) in enumerate(steps, start=1):
        y = 388 + 27 * number
        picture.box(20, y - 16, 24, 22, fill)
        picture.text(32, y, str(number), 13, "middle", bold=True)
        picture.text(54, y, line, 12)
    picture.text(
        20,
        498,
        "In a long call the steps overlap: the next chunk is reduced inside while one travels.",
        12,
        color=GREY,
    )
    return picture.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "architecture.svg": architecture,
    "all_reduce.svg": all_reduce,
    "hosts.svg": hosts,
}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, draw in PICTURES.items():
        (folder / name).write_text(draw())


if __name__ == "__main__":
    main()
