"""Checks of the installation: versions, the native module, its instruction set, the settings."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

import deepspeed_comm
from deepspeed_comm import _plugin
from deepspeed_comm._machine import processor_name
from deepspeed_comm.doctor.examination import Examination
from deepspeed_comm.doctor.report import Finding

_TESTED_TORCH = ("1.13.", "2.13.")
# torch loads plugins since 2.5; since 2.14 it also searches the plugin of an unknown backend.
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_FIRST_WITH_PLUGINS, _FIRST_THAT_ASKS = (2, 5), (2, 14)
_PLUGIN_GROUPS = ("torch.backends", "torch.distributed.backends")
_TORCH_COMMAND = "pip install torch==2.13.0, then build deepspeed_comm again"
# Linux 5.1 has memory that is read-only for peers; 5.3 has pidfd_open().
_BEST_KERNEL = (5, 3)

# Highway's instruction sets: larger numbers are faster. Reductions gain nothing beyond AVX3.
_VECTORS = {
    "EMU128": 0,
    "SCALAR": 0,
    "SSE2": 1,
    "SSSE3": 2,
    "SSE4": 3,
    "AVX2": 4,
    "AVX3": 5,
    "AVX3_DL": 5,
    "AVX3_ZEN4": 5,
    "AVX3_SPR": 5,
    "AVX10_2": 5,
}
_FLAGS = {
    "AVX3": {"avx512f", "avx512vl", "avx512cd", "avx512bw", "avx512dq"},
    "AVX2": {"avx2", "fma", "bmi1", "bmi2", "f16c"},
    "SSE4": {"sse4_1", "ssse3", "pclmulqdq", "aes"},
}


def check_versions(finding: Finding, examination: Examination) -> None:
    facts = examination.extension.facts
    finding.facts.update(
        python=platform.python_version(),
        python_executable=sys.executable,
        deepspeed_comm=deepspeed_comm.__version__,
        deepspeed_comm_folder=os.path.dirname(os.path.abspath(deepspeed_comm.__file__)),
        torch=facts.get("torch"),
        torch_file=facts.get("torch_file"),
        kernel=platform.release(),
        libc=" ".join(platform.libc_ver()),
    )
    finding.say(
        f"deepspeed_comm {deepspeed_comm.__version__}, torch {facts.get('torch', 'none')}, "
        f"Python {platform.python_version()}, Linux {platform.release()}, "
        f"{finding.facts['libc']}"
    )
    finding.say(f"{finding.facts['deepspeed_comm_folder']}, under {sys.executable}")
    if "torch" not in facts:
        finding.problem(
            f"torch cannot be imported ({examination.extension.reason or 'no reason given'})",
            _TORCH_COMMAND,
        )
        return
    if not facts["torch_has_distributed"]:
        finding.problem("this torch was built without torch.distributed", _TORCH_COMMAND)
    if not facts["torch"].startswith(_TESTED_TORCH):
        finding.warn(
            f"torch {facts['torch']} is not tested; 1.13.1 and 2.13 are",
            "run the tests with it (make test), or use a tested torch",
        )
    numbers = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
    if numbers < _BEST_KERNEL:
        finding.warn(
            f"Linux {platform.release()} is older than 5.3: peers may be able to write to each "
            "other's memory, and a dead rank may be noticed later",
            "use a newer kernel if possible",
        )


def check_extension(finding: Finding, examination: Examination) -> None:
    answer = examination.extension
    facts, build = answer.facts, answer.facts.get("build", {})
    finding.facts.update(
        path=facts.get("extension"),
        build=build,
        built_for_torch=facts.get("built_for"),
        cxx11_abi=facts.get("cxx11_abi"),
        registered=facts.get("registered"),
    )
    if build:
        finding.say(
            f"built against torch {build.get('torch_version')} with {build.get('compiler')}, "
            f"{build.get('build_type')}, for Python {build.get('python_version')}"
        )
    if "torch" in facts:
        finding.say(f"torch's C++ ABI: {'cxx11' if facts['cxx11_abi'] else 'before cxx11'}")
    if "extension_error" in facts:
        # The message has the command that rebuilds the module, or names the missing library.
        missing = re.search(r"\(lib(hwloc|hwy)\S* cannot open", facts["extension_error"])
        advice = "do what the message says"
        if missing:
            advice = "apt-get install libhwloc15 libhwy1, or their packages on this system"
        finding.problem(facts["extension_error"], advice)
        return
    if "extension" not in facts:
        finding.problem(
            f"it was not loaded ({answer.reason or 'torch.distributed is missing'})",
            f"build it again against this torch: {_plugin.rebuild_command()}",
        )
        return
    finding.say(facts["extension"])
    _check_plugin(finding, facts["torch"])
    if not facts["registered"]:
        finding.problem(
            'torch does not know the backend "dscomm"',
            "run python -c 'import deepspeed_comm'; its warning has the reason",
        )
    if "group_error" in facts:
        finding.problem(f"a group of one rank fails: {facts['group_error']}", "fix that first")
    elif answer.ended:
        finding.problem(f"a group of one rank failed ({answer.reason})", "build it again")
    if build.get("sanitizers"):
        finding.warn(
            f"it was built with sanitizers ({build['sanitizers']}), which are slow",
            "build it again without DSCOMM_SANITIZE",
        )
    if build.get("build_type") not in ("Release", "RelWithDebInfo", None):
        finding.warn(f"it is a {build['build_type']} build, which is slow", "build it for Release")


def _check_plugin(finding: Finding, torch_version: str) -> None:
    """Checks that torch finds the backend in a program that does not import the package."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", torch_version)[:2])
    finding.facts["is_plugin"] = is_plugin(numbers, os.environ)
    if finding.facts["is_plugin"]:
        return
    if numbers < _FIRST_WITH_PLUGINS:
        finding.say(f"torch {torch_version} has no plugins: programs must import deepspeed_comm")
    elif os.environ.get(_AUTOLOAD, "1") != "1":
        finding.warn(
            f"{_AUTOLOAD}={os.environ[_AUTOLOAD]}: torch loads no plugins, so programs must import "
            "deepspeed_comm to use dscomm",
            f"import deepspeed_comm before init_process_group(), or unset {_AUTOLOAD}",
        )
    else:
        finding.warn(
            "deepspeed_comm is in PYTHONPATH or the current folder, but not installed: programs "
            "must import it to use dscomm",
            "pip install it, or import deepspeed_comm before init_process_group()",
        )


def is_plugin(torch_numbers: tuple[int, ...], environment: Mapping[str, str]) -> bool:
    """Whether this torch, such as (2, 13), registers "dscomm" by itself."""
    names = {group: entry_points(group=group, name="dscomm") for group in _PLUGIN_GROUPS}
    if torch_numbers >= _FIRST_WITH_PLUGINS and environment.get(_AUTOLOAD, "1") == "1":
        return bool(names["torch.backends"])
    return torch_numbers >= _FIRST_THAT_ASKS and bool(names["torch.distributed.backends"])


def check_settings(finding: Finding, examination: Examination) -> None:
    facts = examination.extension.facts
    set_here = {name: text for name, text in os.environ.items() if name.startswith("DSCOMM_")}
    finding.facts.update(set=set_here)
    finding.say(
        ", ".join(f"{name}={text}" for name, text in sorted(set_here.items()))
        if set_here
        else "none is set; the defaults are used"
    )
    for mistake in facts.get("mistakes", []):
        finding.problem(
            mistake,
            "no rank can make a group before this is fixed: dscomm config lists the settings",
        )
    if set_here and "mistakes" not in facts:
        finding.warn(
            "they could not be checked, because the native module does not load", "see extension"
        )


def check_instruction_set(finding: Finding, examination: Examination) -> None:
    target = examination.extension.facts.get("target")
    finding.facts.update(target=target, processor=processor_name())
    finding.say(processor_name())
    if target is None:
        finding.warn("unknown, because the native module does not load", "see extension")
        return
    finding.say(f"reductions run on {target}")
    best = _best_target()
    finding.facts.update(best=best)
    if best is not None and _VECTORS.get(target, 5) < _VECTORS[best]:
        finding.warn(
            f"the processor supports {best.replace('AVX3', 'AVX-512')}, but no reduction uses it",
            "build deepspeed_comm on this host with GCC 12 or newer",
        )


def _best_target() -> str | None:
    """The fastest instruction set among the CPU's flags; None if unknown (not x86)."""
    found = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    flags = set(found[1].split()) if found else set()
    needed: set[str] = set()
    best = None
    for name in reversed(_FLAGS):
        needed |= _FLAGS[name]
        if needed <= flags:
            best = name
    return best
