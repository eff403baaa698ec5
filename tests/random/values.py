"""Data of random programs: inputs that every process can derive, layouts in memory, reductions.

Inputs of reductions are small whole numbers, so that any order of additions gives the same bits.
Data that is only moved is random bytes, so that a misplaced element is detected. Results are sent
as checksums.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

INTEGERS = ["int8", "int16", "int32", "int64", "uint8"]
UNSIGNED = ["uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
WHOLE = sorted({*INTEGERS, *UNSIGNED})
REDUCED = ["bool", *WHOLE, *FLOATS, *COMPLEX]
MOVED = [*REDUCED, *FLOAT8]
OPERATORS = ["SUM", "PRODUCT", "MIN", "MAX", "AVG", "BAND", "BOR", "BXOR", "PREMUL_SUM"]
FACTOR = 2.0  # for PREMUL_SUM
# Layouts of a tensor in memory. "matrix" is transposed, which some calls do not accept.
LAYOUTS = ["plain", "pool", "strided", "offset", "pool_offset", "matrix"]


def has_meaning(dtype: str, op: str) -> bool:
    """Whether `dist` and the backend support this operator for this dtype."""
    if dtype == "bool" or dtype in WHOLE:
        return op not in ("AVG", "PREMUL_SUM")
    if dtype in COMPLEX:
        return op in ("SUM", "AVG")
    return dtype in FLOATS and op not in ("BAND", "BOR", "BXOR")


def _numbers(key: Sequence[int]) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([each + 1 for each in key]))


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 0:
        return b""
    whole = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)
    return bytes(whole.view(torch.uint8).numpy().tobytes())


def checksum(tensor: torch.Tensor) -> list[int]:
    """Number of elements and checksum, in which reported and expected results are compared."""
    return [tensor.numel(), zlib.crc32(bytes_of(tensor))]


def moved_input(dtype: str, count: int, key: Sequence[int]) -> torch.Tensor:
    """Random bytes; the same for the same key in every process."""
    kind = getattr(torch, dtype)
    if count == 0:
        return torch.empty(0, dtype=kind)
    width = torch.empty(0, dtype=kind).element_size()
    raw = _numbers(key).integers(0, 2 if dtype == "bool" else 256, count * width, dtype=np.uint8)
    return torch.from_numpy(raw).view(kind)


def _small(dtype: str, op: str, count: int, key: Sequence[int]) -> np.ndarray[Any, Any]:
    """Whole numbers for a reduction; two rows for complex numbers."""
    rows = 2 if dtype in COMPLEX else 1
    if dtype == "bool":
        low, high = 0, 2
    elif op == "PRODUCT":
        low, high = 1, 3
    elif dtype in UNSIGNED:
        low, high = 0, 4
    else:
        low, high = -3, 4
    return _numbers(key).integers(low, high, (rows, count), dtype=np.int64)


def _tensor(numbers: np.ndarray[Any, Any], dtype: str) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if dtype in COMPLEX:
        wide = torch.complex(*(torch.from_numpy(row.astype(np.float64)) for row in numbers))
        return wide.to(kind)
    return torch.from_numpy(numbers[0].copy()).to(kind)


def reduced_input(dtype: str, op: str, count: int, key: Sequence[int]) -> torch.Tensor:
    return _tensor(_small(dtype, op, count, key), dtype)


_WITH = {
    "SUM": np.add,
    "AVG": np.add,
    "PREMUL_SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


def reduction(dtype: str, op: str, count: int, keys: Sequence[Sequence[int]]) -> torch.Tensor:
    """The reduction of the inputs with these keys, one key per rank of the group."""
    total = _small(dtype, op, count, keys[0])
    for key in keys[1:]:
        total = _WITH[op](total, _small(dtype, op, count, key))
    if dtype == "bool":  # a sum is "or", a product "and"
        total = np.minimum(total, 1)
    if op == "PREMUL_SUM":
        total = total * int(FACTOR)
    if op != "AVG":
        return _tensor(total, dtype)
    if dtype in COMPLEX:
        half = torch.float32 if dtype == "complex64" else torch.float64
        parts = [torch.from_numpy(row).to(half) / len(keys) for row in total]
        return torch.complex(*parts)
    wide = torch.float64 if dtype == "float64" else torch.float32
    return (torch.from_numpy(total[0]).to(wide) / len(keys)).to(getattr(torch, dtype))


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates the tensors; torch cannot do that for every dtype."""
    raw = np.frombuffer(b"".join(bytes_of(part) for part in parts), dtype=np.uint8)
    if raw.size == 0:
        return torch.empty(0, dtype=parts[0].dtype)
    return torch.from_numpy(raw.copy()).view(parts[0].dtype)


def blank(dtype: str, count: int, layout: str, group: Any) -> torch.Tensor:
    """A tensor of `count` elements with this layout, filled with bytes that no result has."""
    import deepspeed_comm

    kind = getattr(torch, dtype)
    room = count + 3
    if layout.startswith("pool"):
        try:
            whole = deepspeed_comm.empty(room, dtype=kind, group=group)
        except (TypeError, ValueError, NotImplementedError):
            whole = torch.empty(room, dtype=kind)
    elif layout == "strided":
        return torch.zeros(2 * count, dtype=torch.uint8).to(kind)[::2]
    elif layout == "matrix" and count % 2 == 0 and count > 0:
        return torch.zeros(2, count // 2, dtype=torch.uint8).to(kind).t()
    else:
        whole = torch.empty(room, dtype=kind)
    whole.view(torch.uint8).fill_(0 if dtype == "bool" else 0xA5)
    return whole[3:] if layout.endswith("offset") else whole[:count]


def placed(flat: torch.Tensor, layout: str, group: Any) -> torch.Tensor:
    """A copy of a flat tensor with this layout."""
    tensor = blank(str(flat.dtype).removeprefix("torch."), flat.numel(), layout, group)
    tensor.copy_(flat.reshape(tensor.shape))
    return tensor
