"""`dscomm config`: every setting, its value, its default, and the source of the value."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from deepspeed_comm.doctor.examination import Examination
from deepspeed_comm.doctor.report import status_of


def main() -> int:
    options = parse_options()
    extension = Examination().extension
    if "settings" not in extension.facts:
        reason = extension.facts.get("extension_error") or extension.reason
        print(f"dscomm config: the native module does not load: {reason}", file=sys.stderr)
        return 1
    rows = chosen(extension.facts["settings"], os.environ)
    rows = [row for row in rows if not options.changed or row["origin"] != "default"]
    mistakes = extension.facts.get("mistakes")
    if options.json:
        print(json.dumps({"settings": rows, "mistakes": mistakes}, indent=2))
    else:
        show(rows)
    if mistakes is None:
        print(f"the values could not be checked: {extension.reason}", file=sys.stderr)
        return 1
    for mistake in mistakes:
        print(f"mistake: {mistake}", file=sys.stderr)
    return 1 if mistakes else 0


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dscomm config",
        description="Show every setting, its value, its default, and the source of the value.",
        epilog="Exit status: 0; 1 if a value is not allowed, if a variable DSCOMM_... is not a "
        "setting, or if the native module does not load.",
    )
    parser.add_argument(
        "--changed", action="store_true", help="only settings that differ from their default"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser.parse_args()


def chosen(rows: list[dict[str, str]], environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Adds "value" and "origin" ("default" or "environment") to the extension's settings."""
    found = []
    for row in rows:
        # An empty value means the default.
        value = environment.get(row["name"], "")
        origin = "environment" if value else "default"
        found.append({**row, "value": value or row["default"], "origin": origin})
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """Prints a line for each setting: name, value with unit, origin, default."""
    if not rows:
        print("all settings have their defaults")
        return
    table = [
        (
            row["name"],
            f"{row['value'] or '(empty)'} {row['unit']}".rstrip(),
            row["origin"],
            f"default {row['default'] or '(empty)'}" if row["origin"] != "default" else "",
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in table) for column in range(3)]
    for name, value, origin, default in table:
        line = f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin:<{widths[2]}}  {default}"
        print(line.rstrip())


if __name__ == "__main__":
    sys.exit(status_of(main))
