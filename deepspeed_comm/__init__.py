"""deepspeed_comm: the torch.distributed backend "dscomm" for CPU tensors.

Importing this package makes the backend known to torch where torch does not do so by itself: old
torch has no plugins, and newer torch may be told to load none. The native code is loaded with the
first process group. torch imports this package in every program of its environment, so whatever
is added here must be imported when it is asked for (__getattr__ of PEP 562), not at the top.

    import deepspeed_comm as dist  # was: from deepspeed import comm as dist

has deepspeed.comm's API: everything of comm.py is found here under its name.

The extension fits one torch, so each build of it lies in a folder named after its torch, and an
editable install can serve several environments. The folder for the torch at hand joins the
package's search path here, which is what makes `deepspeed_comm._C` importable. A checkout without
such a folder uses that of the installed package: see _use_installed_build() of _plugin.py.
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


_CHANGING = ("cdb",)  # names that comm.py gives new values


def __getattr__(name: str) -> Any:
    # What is private is of a module. torch asks for "__path__" and the like while it loads plugins.
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module 'deepspeed_comm' has no attribute {name!r}")
    # By its full name: "from deepspeed_comm import comm" would come here again. Modules come first,
    # for comm.py imports most of them, and they must not need it.
    if importlib.util.find_spec(f"{__name__}.{name}") is not None:
        return importlib.import_module(f"{__name__}.{name}")
    api = importlib.import_module("deepspeed_comm.comm")
    if name == "__all__":
        return [each for each, value in vars(api).items() if _is_public(each, value)]
    try:
        value = getattr(api, name)
    except AttributeError:
        raise AttributeError(f"module 'deepspeed_comm' has no attribute {name!r}") from None
    # Kept: this way takes more than a microsecond.
    if name not in _CHANGING:
        globals()[name] = value
    return value


def _is_public(name: str, value: Any) -> bool:
    return not name.startswith("_") and not isinstance(value, ModuleType)


def __dir__() -> list[str]:
    api = importlib.import_module("deepspeed_comm.comm")
    return sorted({*globals(), *(name for name in vars(api) if not name.startswith("_"))})
