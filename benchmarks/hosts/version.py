"""The version of an MPI library. Run as a program, it loads the module of its argument, prints the
version of the MPI library that came with it, and imports no torch."""

from __future__ import annotations

import ctypes
import sys

_LONGEST = 8192  # MPI_MAX_LIBRARY_VERSION_STRING is 256 in Open MPI, 8192 in MPICH


def version_of(mpi: ctypes.CDLL) -> str:
    """Like "Open MPI v4.1.4" or "MPICH Version: 5.0.2"; MPI need not be initialised."""
    text = ctypes.create_string_buffer(_LONGEST)
    mpi.MPI_Get_library_version(text, ctypes.byref(ctypes.c_int()))
    first_line = text.value.decode().partition("\n")[0]
    return " ".join(first_line.partition(",")[0].split())


if __name__ == "__main__":
    print(version_of(ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)))
