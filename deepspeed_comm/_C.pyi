"""The native module, csrc/torch/bindings.cc. It lies in a folder of _native/ named after its torch,
which joins the package's search path; tests/house/test_types.py compares this with it."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypedDict, type_check_only

from torch import Tensor
from torch._C._distributed_c10d import Backend, Work, _DistributedBackendOptions

@type_check_only
class Setting(TypedDict):
    """One row of docs/settings.md; all are texts, as the environment has them."""

    name: str
    default: str
    allowed: str
    unit: str
    meaning: str

torch_version: str

def create_backend(
    distributed_backend_options: _DistributedBackendOptions, pg_options: Any = None
) -> DscommBackend: ...
def settings() -> list[Setting]: ...
def reduce_target() -> str: ...
def direct_all_reduce(tensor: Any, op: Any, group: Any, async_op: Any, /) -> Any: ...
def remember_group(group: Any, backend: DscommBackend) -> None: ...
def remember_op(op: Any, torch_op: Any) -> None: ...
def repeated_all_reduce(
    tensor: Tensor, op: Any, torch_op: Any, group: Any, backend: DscommBackend, match_id: str
) -> Callable[[Any, Any, Any, Any], Any]: ...

class DscommBackend(Backend):
    class Options(Backend.Options):
        def __init__(self, timeout: timedelta = ...) -> None: ...
        def __deepcopy__(self, memo: dict[Any, Any], /) -> DscommBackend.Options: ...

    @property
    def options(self) -> DscommBackend.Options: ...
    def all_reduce(self, tensor: Tensor, op: Any, async_op: bool) -> Work | None: ...
    def all_reduce_caching(
        self, tensor: Tensor, op: Any, match_id: str, async_op: bool
    ) -> Work | None: ...
    def describe(self) -> str: ...
    def flight_record(self) -> str: ...
