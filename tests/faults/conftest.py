from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator

# Before importing torch: ranks are forked, which an OpenMP pool of the parent would not survive.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)

_CLONE_NEWNS = 0x00020000
_MS_REC, _MS_PRIVATE = 0x4000, 0x40000


def pytest_configure(config: pytest.Config) -> None:
    # TEST_DRILL=1 runs the long forms too, unless other marks are selected.
    if os.environ.get("TEST_DRILL") == "1" and config.option.markexpr == "not drill":
        config.option.markexpr = ""


@pytest.fixture(scope="session", autouse=True)
def private_folders() -> Iterator[None]:
    """A private TMPDIR and, for root, a private /dev/shm: tests check for leftovers there, which
    other jobs of the host must not disturb."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0 and libc.unshare(_CLONE_NEWNS) == 0:
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None)
    with tempfile.TemporaryDirectory(prefix="dscomm-test-") as folder:
        os.chmod(folder, 0o1777)  # some tests run ranks as another user
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        yield
