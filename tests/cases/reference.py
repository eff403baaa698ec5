"""Reference results of collectives, computed in rank order by numpy and torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

BOOL = [torch.bool]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
UNSIGNED = [torch.uint8] + [
    getattr(torch, name) for name in ("uint16", "uint32", "uint64") if hasattr(torch, name)
]
INTEGERS = SIGNED + UNSIGNED
SHORT_FLOATS = [torch.float16, torch.bfloat16]
LONG_FLOATS = [torch.float32, torch.float64]
FLOATS = SHORT_FLOATS + LONG_FLOATS
COMPLEX = [torch.complex64, torch.complex128]
FLOAT8 = [
    getattr(torch, name)
    for name in (
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
]
REDUCED = BOOL + INTEGERS + FLOATS + COMPLEX
MOVED = REDUCED + FLOAT8

Op = dist.ReduceOp
OPS = {
    "SUM": Op.SUM,
    "PRODUCT": Op.PRODUCT,
    "MIN": Op.MIN,
    "MAX": Op.MAX,
    "AVG": Op.AVG,
    "BAND": Op.BAND,
    "BOR": Op.BOR,
    "BXOR": Op.BXOR,
}

# numpy's dtype of the same size, for dtypes for which torch has few operations.
_NUMPY = {torch.uint8: np.uint8, torch.int8: np.int8, torch.int16: np.int16, torch.int32: np.int32}
_NUMPY |= {torch.int64: np.int64, torch.float32: np.float32, torch.float64: np.float64}
_NUMPY |= {torch.bool: np.bool_, torch.complex64: np.complex64, torch.complex128: np.complex128}
_SAME_BYTES = {}
for _name in ("uint16", "uint32", "uint64"):
    if hasattr(torch, _name):
        _NUMPY[getattr(torch, _name)] = getattr(np, _name)
        _SAME_BYTES[getattr(torch, _name)] = getattr(torch, _name[1:])


def has_meaning(dtype: torch.dtype, op: str) -> bool:
    if dtype in BOOL or dtype in INTEGERS:
        return op not in ("AVG", "PREMUL_SUM")
    if dtype in COMPLEX:
        # torch.distributed itself refuses PRODUCT of complex numbers.
        return op in ("SUM", "AVG", "PREMUL_SUM")
    return dtype in FLOATS and op not in ("BAND", "BOR", "BXOR")


def make_input(dtype: torch.dtype, shape: Sequence[int], rank: int, seed: int = 0) -> torch.Tensor:
    """A rank's input, the same wherever it is made; integers use the whole range."""
    generator = torch.Generator().manual_seed(seed * 1000 + rank)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(torch.bool)
    if dtype in INTEGERS:
        low = torch.randint(-(2**62), 2**62, shape, generator=generator) * 2 + rank
        width = torch.empty(0, dtype=dtype).element_size()
        whole = low.reshape(-1).view(torch.uint8).reshape(-1, 8)[:, :width].contiguous()
        return whole.view(dtype).reshape(shape)
    if dtype in COMPLEX:
        return torch.randn(shape, generator=generator, dtype=torch.complex128).to(dtype)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(torch.float32).to(dtype)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    dtype = tensor.dtype
    if dtype in _SAME_BYTES:
        return tensor.view(_SAME_BYTES[dtype]).numpy().view(_NUMPY[dtype])
    return tensor.numpy()


def from_numpy(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    array = np.ascontiguousarray(array)
    if dtype in _SAME_BYTES:
        signed = array.view(np.dtype(f"int{array.dtype.itemsize * 8}"))
        return torch.from_numpy(signed).view(dtype)
    return torch.from_numpy(array)


_LOGIC = {
    "SUM": np.logical_or,
    "PRODUCT": np.logical_and,
    "MIN": np.logical_and,
    "MAX": np.logical_or,
}
_LOGIC |= {"BAND": np.logical_and, "BOR": np.logical_or, "BXOR": np.logical_xor}
_ARITHMETIC = {"SUM": np.add, "AVG": np.add, "PREMUL_SUM": np.add, "PRODUCT": np.multiply}
_ARITHMETIC |= {"MIN": np.minimum, "MAX": np.maximum}
_ARITHMETIC |= {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}


def reduce_reference(inputs: Sequence[torch.Tensor], op: str, factor: float = 1.0) -> torch.Tensor:
    """The reduction in rank order; fp16 and bf16 accumulate in fp32 and round once."""
    dtype, shape = inputs[0].dtype, inputs[0].shape
    if dtype in SHORT_FLOATS:
        wide = reduce_reference([tensor.float() for tensor in inputs], op, factor)
        return wide.to(dtype)
    if dtype in COMPLEX and op != "PRODUCT":
        # Real and imaginary parts separately, as torch.distributed passes them to a backend.
        parts = [torch.view_as_real(tensor) for tensor in inputs]
        return torch.view_as_complex(reduce_reference(parts, op, factor))
    arrays = [to_numpy(tensor.reshape(-1)) for tensor in inputs]
    with np.errstate(all="ignore"):
        if op == "PREMUL_SUM":
            scale = arrays[0].dtype.type(factor)
            arrays = [array * scale for array in arrays]
        function = _LOGIC[op] if dtype == torch.bool else _ARITHMETIC[op]
        total = functools.reduce(function, arrays).astype(arrays[0].dtype, copy=False)
        if op == "AVG":
            total = total / total.dtype.type(len(inputs))
    return from_numpy(total, dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes, so that NaNs, signed zeros and float8 can be compared."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.numel() == 0:
        return torch.empty(0, dtype=torch.uint8)
    # A copy, since even one contiguous element may have a stride that cannot be viewed as bytes.
    return torch.empty(flat.shape, dtype=flat.dtype).copy_(flat).view(torch.uint8)


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    assert got.dtype == expected.dtype, f"{what}: {got.dtype}, expected {expected.dtype}"
    same = torch.equal(bits(got), bits(expected))
    assert same, f"{what}:\ngot      {got}\nexpected {expected}"
