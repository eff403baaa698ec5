"""`dscomm info`: versions, this host, and the transports available on it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from typing import Any

import deepspeed_comm
from deepspeed_comm._machine import describe_place, processor_name
from deepspeed_comm.doctor.examination import Examination
from deepspeed_comm.doctor.report import status_of


def main() -> int:
    options = parse_options()
    facts = gather(Examination())
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        width = max(map(len, facts))
        for name, text in facts.items():
            print(f"{name:<{width}}  {text}")
    return 0 if not facts["native module"].startswith("none") else 1


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="dscomm info",
        description="Show versions, this host, and the transports available on it.",
        epilog="Exit status: 0; 1 if the native module does not load.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser.parse_args()


def gather(examination: Examination) -> dict[str, str]:
    """The lines of the output, by their heading."""
    extension = examination.extension
    facts, build = extension.facts, extension.facts.get("build", {})
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return {
        "deepspeed_comm": f"{deepspeed_comm.__version__}, {package_folder()}",
        "python": f"{python}, {sys.executable}",
        "torch": f"{facts['torch']}, {facts['torch_file']}" if "torch" in facts else "none",
        "native module": native_module(facts, build, extension.reason),
        "processor": processor_name(),
        "host": describe_place(),
        "inside a host": "shared memory"
        if facts.get("group") == "made"
        else f"nothing: {facts.get('group_error') or 'no group could be made'}",
        "between hosts": between_hosts(examination, build),
    }


def package_folder() -> str:
    return os.path.dirname(os.path.abspath(deepspeed_comm.__file__))


def native_module(facts: dict[str, Any], build: dict[str, str], reason: str) -> str:
    if "extension" not in facts:
        return f"none: {facts.get('extension_error') or reason}"
    compiler = build.get("compiler", "an unknown compiler")
    return (
        f"built against torch {facts['built_for']} by {compiler}, "
        f"computes with {facts['target']}, {facts['extension']}"
    )


def between_hosts(examination: Examination, build: dict[str, str]) -> str:
    """The MPI library chosen by DSCOMM_MPI, and the others of the build."""
    versions = {each.name: build.get(each.version_key) for each in examination.libraries}
    built = {name: version for name, version in versions.items() if version}
    library = examination.mpi
    if not examination.transport_file:
        return f"nothing: this build has no module for {library.name}"
    others = [f"{name} {version}" for name, version in built.items() if name != library.name]
    text = f"{library.name} (built with {built.get(library.name, 'an unknown version')})"
    if library.setting == "openmpi":
        text += ", started by " + ("dscomm-pmix" if examination.helper_file else "mpirun or srun")
    return text + (f"; also built with {', '.join(others)}" if others else "")


if __name__ == "__main__":
    sys.exit(status_of(main))
