"""A decode through DeepSpeed's AutoTP, which looks for the layers to shard by itself.

DeepSpeed's own all-reduce over shared memory is a contender too: built here by DeepSpeed, once,
into build/deepspeed_ops.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from decoding import decode, whole_model
from workload import DEEPSPEED, DIRECT, DSCOMM, GLOO, Measured, Metric, Workload

import deepspeed_comm

CONTENDERS = (GLOO, DSCOMM, DIRECT, DEEPSPEED)
BUILT = Path(__file__).resolve().parents[2] / "build" / "deepspeed_ops"
BUILD_LIMIT_S = 300.0
BUILD = """
import torch
from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder
level = ShareMemCommBuilder().load().vector_kernel_level()
assert level >= 2, f"its kernels for bfloat16 need AVX-512, and found level {level}"
"""


def prepare(quick: bool) -> dict[str, str]:
    if importlib.util.find_spec("deepspeed") is None:
        reason = "DeepSpeed is not installed here; tests/clients/setup makes an environment with it"
        return dict.fromkeys(CONTENDERS, reason)
    import deepspeed

    deepspeed.utils.logger.setLevel("ERROR")
    whole_model(quick)
    # Else DeepSpeed builds its op with every process group.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if quick:
        return {DEEPSPEED: "the quick run does not build it"}
    reason = why_not_built()
    return {DEEPSPEED: reason} if reason else {}


def why_not_built() -> str | None:
    """Builds DeepSpeed's op in another process, so that its registrations in torch stay there."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(BUILT)
    # Makes DeepSpeed find the ninja of this environment.
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    try:
        built = subprocess.run(
            [sys.executable, "-c", BUILD], capture_output=True, text=True, timeout=BUILD_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"its build took more than {BUILD_LIMIT_S:.0f} s"
    return f"it cannot be built: {built.stderr[-600:].strip()}" if built.returncode else None


def measure(contender: str, quick: bool) -> Measured:
    import deepspeed
    from deepspeed.module_inject import layers

    size = int(os.environ["WORLD_SIZE"])
    if contender == DEEPSPEED:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = True
        os.environ["LOCAL_SIZE"] = str(size)
    if contender == DIRECT:
        deepspeed_comm.init_distributed(DSCOMM, verbose=False)
        # DeepSpeed has no setting for the all-reduce of its layers, which look it up in the module
        # `dist`. deepspeed_comm has all functions that they use.
        layers.dist = deepspeed_comm
    else:
        backend = DSCOMM if contender == DSCOMM else GLOO
        deepspeed.init_distributed(backend, verbose=False)
    try:
        engine = deepspeed.init_inference(
            whole_model(quick), tensor_parallel={"tp_size": size}, dtype=torch.bfloat16
        )
        sharded = [
            each for each in engine.module.modules() if isinstance(each, layers.LinearAllreduce)
        ]
        if not sharded:
            raise RuntimeError("AutoTP has sharded nothing")
        return decode(engine, quick)
    finally:
        dist.barrier()
        if contender == DEEPSPEED:
            remove_workspace()


def remove_workspace() -> None:
    """Removes the memory that DeepSpeed's op leaves behind, 66 MB of each rank."""
    name = (
        f"deepspeed_allreduce_buffer_{os.getuid()}_{os.environ['MASTER_ADDR']}_"
        f"{os.environ['MASTER_PORT']}_{dist.get_rank()}"
    )
    (Path("/dev/shm") / name).unlink()


WORKLOAD = Workload(
    {"word": Metric("tensor-parallel decode, DeepSpeed AutoTP", "tokens/s")},
    measure,
    CONTENDERS,
    prepare,
    has_group=False,
)
