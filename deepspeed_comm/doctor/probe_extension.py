"""A child of the doctor: imports torch, loads the native module, makes a group of one rank.

Reports, in this order: torch, the build, the extension, its instruction set, the mistakes in the
settings, the group.
"""

from __future__ import annotations

import ast
import os
import re
from typing import Any

from deepspeed_comm import _plugin
from deepspeed_comm.doctor.child import tell


def main() -> None:
    import torch
    import torch.distributed as dist

    tell(
        torch=str(torch.__version__),
        torch_file=torch.__file__,
        cxx11_abi=bool(torch._C._GLIBCXX_USE_CXX11_ABI),
        torch_has_distributed=dist.is_available(),
    )
    if not dist.is_available():
        return
    tell(registered=hasattr(dist.Backend, "DSCOMM"), **_build(str(torch.__version__)))
    try:
        native = _plugin.load_extension()
    except RuntimeError as error:
        tell(extension_error=str(error))
        return
    tell(
        # Again, because loading may have found a build in another folder.
        **_build(str(torch.__version__)),
        extension=native.__file__,
        built_for=native.torch_version,
        target=native.reduce_target(),
        settings=native.settings(),
    )
    _read_settings()


def _build(torch_version: str) -> dict[str, Any]:
    folder = _plugin.native_folder(torch_version)
    return {"folder": folder, "build": _build_record(folder)}


def _build_record(folder: str) -> dict[str, str]:
    """The names and values of _build_info.py; empty without a build."""
    try:
        with open(os.path.join(folder, "_build_info.py")) as record:
            lines = re.findall(r'^(\w+) = (".*")$', record.read(), re.M)
    except OSError:  # no build; loading the extension reports it
        return {}
    return {name: ast.literal_eval(text) for name, text in lines}


def _read_settings() -> None:
    """Makes a group of one rank. The core reports one mistake at a time, so each is removed before
    the next attempt."""
    import torch.distributed as dist

    mistakes: list[str] = []
    for _ in range(1 + sum(name.startswith("DSCOMM_") for name in os.environ)):
        try:
            dist.init_process_group("dscomm", store=dist.HashStore(), rank=0, world_size=1)
        except Exception as error:
            said = re.search(r"\b(DSCOMM_\w+)( is not a setting|=).*", str(error), re.S)
            if said is None or said[1] not in os.environ:
                tell(mistakes=mistakes, group_error=str(error))
                return
            mistakes.append(said[0])
            del os.environ[said[1]]
        else:
            tell(mistakes=mistakes, group="made")
            dist.destroy_process_group()
            return
    tell(mistakes=mistakes, group_error="the mistakes in the settings could not be separated")


if __name__ == "__main__":
    main()
