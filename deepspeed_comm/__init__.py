"""deepspeed_comm: the torch.distributed backend "dscomm" for CPU tensors.

Importing this package registers the backend, for a torch that does not load plugins: torch before
2.5, or TORCH_DEVICE_BACKEND_AUTOLOAD=0. The first process group loads the native code.

    import deepspeed_comm as dist  # was: from deepspeed import comm as dist

The package has deepspeed.comm's API: all names of comm.py.

torch imports this package in every program of its environment, so all modules except _plugin are
imported on first use, by __getattr__ (PEP 562), never at the top.

Each build of the native code fits one torch and has a folder named after it, so an editable install
can serve several environments. The folder for the current torch is added to __path__ below, which
makes `deepspeed_comm._C` importable. Without a build in this folder, that of an installed package
is used: see _use_installed_build() in _plugin.py.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

from deepspeed_comm import _plugin

__version__ = "0.1.0"

_torch_version = None if _plugin.only_examines() else _plugin.torch_version()
if _torch_version is not None:
    __path__.append(_plugin.native_folder(_torch_version))
    _plugin._autoload()


_CHANGING = ("cdb",)  # names that comm.py assigns again


def __getattr__(name: str) -> Any:
    # Private names belong to modules. torch looks up "__path__" and the like while loading plugins.
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module 'deepspeed_comm' has no attribute {name!r}")
    # Modules first, because comm.py has other objects with their names, such as `torch`. The full
    # name is used, because "from deepspeed_comm import comm" would call this function again.
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    api = importlib.import_module("deepspeed_comm.comm")
    if name == "__all__":
        return [each for each, value in vars(api).items() if _is_public(each, value)]
    try:
        value = getattr(api, name)
    except AttributeError:
        raise AttributeError(f"module 'deepspeed_comm' has no attribute {name!r}") from None
    # Cached, because this lookup takes more than a microsecond.
    if name not in _CHANGING:
        globals()[name] = value
    return value


def _is_public(name: str, value: Any) -> bool:
    return not name.startswith("_") and not isinstance(value, ModuleType)


def __dir__() -> list[str]:
    api = importlib.import_module("deepspeed_comm.comm")
    return sorted({*globals(), *(name for name in vars(api) if not name.startswith("_"))})
