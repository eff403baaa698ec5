"""A child of the doctor: loads the transport module like the core, and initialises MPI.

It runs as a file and does not import the package, whose import takes as long as torch's. Reports
the library, its version, and the thread level, in this order.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import sys

THREAD_MULTIPLE = 3
VERSION_BYTES = 8192  # the version texts of MPI libraries are shorter


def tell(**facts: object) -> None:
    print("doctor: " + json.dumps(facts), flush=True)


def main() -> None:
    # As csrc/core/transport/load.cc does.
    library = ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW | os.RTLD_GLOBAL)
    # Without /proc, the library's file is not reported.
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        tell(library=next(iter(re.findall(r"/\S*/libmpi(?:ch)?\.so\S*", maps.read())), ""))
    version = ctypes.create_string_buffer(VERSION_BYTES)
    library.MPI_Get_library_version(version, ctypes.byref(ctypes.c_int()))
    tell(version=version.value.decode(errors="replace").strip())
    level = ctypes.c_int(-1)
    code = library.MPI_Init_thread(None, None, THREAD_MULTIPLE, ctypes.byref(level))
    tell(init_code=code, thread_level=level.value)
    if code == 0:
        tell(finalize_code=library.MPI_Finalize())


if __name__ == "__main__":
    main()
