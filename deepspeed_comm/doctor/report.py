"""The findings of checks, and their output as JSON, as plain text, or with rich on a terminal."""

from __future__ import annotations

import dataclasses
import enum
import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any

# Incremented with incompatible changes of the JSON.
SCHEMA = 1


class Outcome(enum.IntEnum):
    """Outcomes, in ascending order of severity."""

    OK = 0
    WARNING = 1
    PROBLEM = 2

    @property
    def word(self) -> str:
        return self.name.lower()


@dataclasses.dataclass(frozen=True)
class Trouble:
    """One fault, and the advice to fix it."""

    outcome: Outcome
    wrong: str
    advice: str


@dataclasses.dataclass
class Finding:
    """The result of one check, which fills it step by step: facts survive a failure."""

    name: str
    found: list[str] = dataclasses.field(default_factory=list)
    troubles: list[Trouble] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)  # serializable as JSON

    @property
    def outcome(self) -> Outcome:
        return max((trouble.outcome for trouble in self.troubles), default=Outcome.OK)

    def say(self, found: str) -> None:
        self.found.append(found)

    def warn(self, wrong: str, advice: str) -> None:
        """Adds a fault with which dscomm works, but slower or with limits."""
        self.troubles.append(Trouble(Outcome.WARNING, wrong, advice))

    def problem(self, wrong: str, advice: str) -> None:
        """Adds a fault with which dscomm does not work."""
        self.troubles.append(Trouble(Outcome.PROBLEM, wrong, advice))

    def soften(self) -> None:
        """Turns problems into warnings, for features that the job does not need."""
        self.troubles = [
            dataclasses.replace(each, outcome=min(each.outcome, Outcome.WARNING))
            for each in self.troubles
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "outcome": self.outcome.word,
            "found": self.found,
            "troubles": [
                {"outcome": each.outcome.word, "wrong": each.wrong, "advice": each.advice}
                for each in self.troubles
            ],
            "facts": self.facts,
        }


def worst(findings: Iterable[Finding]) -> Outcome:
    return max((finding.outcome for finding in findings), default=Outcome.OK)


def as_json(findings: list[Finding], about: dict[str, Any]) -> dict[str, Any]:
    """The object of --json. about: the object's entries about the host."""
    return {
        "schema": SCHEMA,
        **about,
        "outcome": worst(findings).word,
        "checks": [finding.as_json() for finding in findings],
    }


def summary(findings: list[Finding]) -> str:
    def count(outcome: Outcome) -> str:
        number = sum(finding.outcome is outcome for finding in findings)
        return f"{number} {outcome.word}{'' if number == 1 or outcome is Outcome.OK else 's'}"

    return ", ".join(count(outcome) for outcome in (Outcome.PROBLEM, Outcome.WARNING, Outcome.OK))


def status_of(main: Callable[[], int]) -> int:
    """Runs main(); returns its exit status, or SIGPIPE's if the reader ended (`| head`)."""
    try:
        status = main()
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Python flushes standard output again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def printer() -> Callable[[Finding], None]:
    """The function that prints a finding: with rich on a terminal, else as plain text with unbroken
    lines, for grep."""
    if sys.stdout.isatty() and importlib.util.find_spec("rich") is not None:
        return _rich_printer()
    return _print_plain


def _lines(finding: Finding) -> list[tuple[str, str]]:
    """(kind, text) of each line after the first."""
    lines = [("", text) for text in finding.found[1:]]
    for trouble in finding.troubles:
        lines += [(trouble.outcome.word, trouble.wrong), ("to do", trouble.advice)]
    return lines


def _print_plain(finding: Finding) -> None:
    first = finding.found[0] if finding.found else ""
    print(f"{finding.outcome.word:<8} {finding.name}: {first}".rstrip(": "))
    for kind, text in _lines(finding):
        print(f"         {kind}: {text}" if kind else f"         {text}")
    sys.stdout.flush()


def _rich_printer() -> Callable[[Finding], None]:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    colours = {"ok": "green", "warning": "yellow", "problem": "bold red", "to do": "bold"}

    def show(finding: Finding) -> None:
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=8)
        grid.add_column(overflow="fold")  # do not cut paths
        word = finding.outcome.word
        first = Text().append(finding.name, style="bold")
        if finding.found:
            first.append(f": {finding.found[0]}")
        grid.add_row(Text(word, style=colours[word]), first)
        for kind, text in _lines(finding):
            line = Text().append(f"{kind}: ", style=colours[kind]) if kind else Text()
            grid.add_row("", line.append(text))
        console.print(grid)

    return show
