"""The product that reads the features once (single_read.cu): compiled and launched.

It needs clusters of blocks that write to each other's shared memory, which Triton has no words for;
so this one kernel is CUDA, for NVIDIA's runtime compiler. torch brings that along, and from 2.10 on
the bindings to it. Where they are missing, `fused` reads the features twice.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from moemerge.kernels.splitting import COARSE, Terms

SOURCE = "single_read.cu"
NAME = "single_read"
EXPERTS = 64  # to which V and its bias are padded
RANKS = 4  # blocks of a cluster
TILE = 32  # tokens
SLICE = 512  # columns of a block
SLOTS = 4  # tiles on their way through a cluster
STRETCH = 32  # tiles that are summed by tensor cores alone
THREADS = 384
SHARED = 230_528  # bytes of a block
ATOM = 64  # columns that are read as one row of 128 bytes
VECTOR = 4  # experts that a thread reads at once
ALIGNMENT = VECTOR * 4  # bytes
# Of narrower features too many of a cluster's blocks would have too little.
NARROWEST = RANKS * SLICE * 3 // 4
# Tokens added up in float32 before float64 takes over.
ROWS_PER_CLUSTER = 1 << 17
MAPS = 64  # descriptions of features that are kept

_FIRST = threading.Lock()


@dataclass(frozen=True)
class Kernel:
    function: Any
    clusters: int  # that the device runs at once


def serves(x: Tensor, v: Tensor, terms: Terms, kind: str) -> bool:
    """Whether a product of features that `fused` serves can be had from this kernel."""
    tokens, width = x.shape
    experts, columns = v.shape
    return (
        terms == COARSE
        and tokens > 0
        and experts <= EXPERTS
        and experts % VECTOR == 0
        and NARROWEST <= width <= RANKS * SLICE
        and width % ATOM == 0
        and x.is_cuda
        and _kernel(x.device, kind, columns > width) is not None
    )


def partial_sums(
    x: Tensor,
    v: Tensor,
    bias: Tensor,
    diagonal: Tensor | None,
    rank_one: Tensor | None,
    *,
    kind: str,
    shape: tuple[int, ...],
) -> tuple[Tensor, Tensor]:
    """Σ u_t x_tᵀ, (clusters, 64, d) float32, and Σ u_t, (parts, 64) float64, of u = H (V x + bias).

    V is bf16, and like the bias padded to 64 experts; `shape` is the one it had. Where it had no
    bias, Σ u_t is empty.
    """
    experts, columns = shape
    has_bias = columns > x.shape[1]
    kernel = _kernel(x.device, kind, has_bias)
    if kernel is None:
        raise RuntimeError(f"no kernel for {kind} weights on {x.device}; ask `serves` first")
    tokens, width = x.shape
    tiles = _ceil(tokens, TILE)
    rounds = _ceil(tokens, kernel.clusters * ROWS_PER_CLUSTER)
    tiles_of_cluster = _ceil(tiles, kernel.clusters * rounds)
    clusters = _ceil(tiles, tiles_of_cluster)
    partial = torch.empty(clusters, EXPERTS, width, dtype=torch.float32, device=x.device)
    parts = clusters * TILE if has_bias else 0
    sums = torch.empty(parts, EXPERTS, dtype=torch.float64, device=x.device)
    # A kernel wants a pointer even where it does not read.
    h = [bias if part is None else readable(part) for part in (diagonal, rank_one)]
    tensors = v, bias, *h, partial, sums
    arguments = [
        _tensor_map(x.data_ptr(), tokens, width, x.stride(0)),
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
        *(ctypes.c_int(number) for number in (tokens, width, experts, tiles_of_cluster)),
    ]
    with torch.cuda.device(x.device):
        _launch(kernel, clusters, arguments)
    return partial, sums


def readable(weights: Tensor) -> Tensor:
    """The weights as the kernel reads them: float32, a row after the other, 16 bytes at once."""
    weights = weights.float().contiguous()
    return weights if weights.data_ptr() % ALIGNMENT == 0 else weights.clone()


def _launch(kernel: Kernel, clusters: int, arguments: list[Any]) -> None:
    driver = _bindings("driver")
    pointers = (ctypes.c_void_p * len(arguments))(*(_address(a) for a in arguments))
    _check(
        driver.cuLaunchKernel(
            kernel.function,
            *(RANKS * clusters, 1, 1),
            *(THREADS, 1, 1),
            SHARED,
            torch.cuda.current_stream().cuda_stream,
            ctypes.addressof(pointers),
            0,
        )
    )


def _address(argument: Any) -> int:
    return int(argument.getPtr()) if hasattr(argument, "getPtr") else ctypes.addressof(argument)


@lru_cache(MAPS)
def _tensor_map(pointer: int, tokens: int, width: int, stride: int) -> Any:
    """bf16 features as (d / 64, tokens, 64), of which a warpgroup reads its columns of a tile."""
    driver = _bindings("driver")
    wide, narrow, size = driver.cuuint64_t, driver.cuuint32_t, torch.bfloat16.itemsize
    return _check(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            3,
            pointer,
            [wide(n) for n in (ATOM, tokens, width // ATOM)],
            [wide(n * size) for n in (stride, ATOM)],
            [narrow(n) for n in (ATOM, TILE, SLICE // 2 // ATOM)],
            [narrow(1)] * 3,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def _kernel(device: torch.device, kind: str, has_bias: bool) -> Kernel | None:
    with _FIRST:
        return _compiled(device, kind, has_bias)


@cache
def _compiled(device: torch.device, kind: str, has_bias: bool) -> Kernel | None:
    if not has_bindings():
        return None
    try:
        with torch.cuda.device(device):
            kernel = _loaded(_binary(kind, has_bias))
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of compilers and drivers: none of them ours
        logging.getLogger(__name__).warning(
            "CUDA's runtime compiler is of no use here, so features are read twice (%s: %s)",
            type(error).__name__,
            (str(error).strip() or "no reason given").splitlines()[0],
        )
        return None
    return kernel if kernel.clusters > 0 else None


def has_bindings() -> bool:
    try:
        return find_spec("cuda.bindings") is not None
    except ModuleNotFoundError:  # of cuda itself
        return False


def options(kind: str, has_bias: bool) -> list[str]:
    """What the source leaves to be defined, as the compiler wants it."""
    defined = {
        "RANKS": RANKS,
        "TILE": TILE,
        "EXPERTS": EXPERTS,
        "SLICE": SLICE,
        "SLOTS": SLOTS,
        "STRETCH": STRETCH,
        "SHARED": SHARED,
        "WEIGHTS": kind.upper(),
        "HAS_BIAS": int(has_bias),
    }
    return ["--std=c++17", *(f"-D{name}={value}" for name, value in defined.items())]


def source() -> bytes:
    return files(__package__).joinpath(SOURCE).read_bytes()


def _binary(kind: str, has_bias: bool) -> bytes:
    nvrtc = _bindings("nvrtc")
    flags = [flag.encode() for flag in ("--gpu-architecture=sm_90a", *options(kind, has_bias))]
    program = _check(nvrtc.nvrtcCreateProgram(source(), SOURCE.encode(), 0, None, None))
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        if int(error) != 0:
            log = bytes(_check(nvrtc.nvrtcGetProgramLogSize(program)))
            _check(nvrtc.nvrtcGetProgramLog(program, log))
            raise RuntimeError(f"{error}: {log.decode(errors='replace').strip(chr(0))}")
        binary = bytes(_check(nvrtc.nvrtcGetCUBINSize(program)))
        _check(nvrtc.nvrtcGetCUBIN(program, binary))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return binary


def _loaded(binary: bytes) -> Kernel:
    driver = _bindings("driver")
    torch.cuda.current_stream().synchronize()  # makes the device's context this thread's
    module = _check(driver.cuModuleLoadData(binary))
    function = _check(driver.cuModuleGetFunction(module, NAME.encode()))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _check(driver.cuFuncSetAttribute(function, most, SHARED))
    cluster = driver.CUlaunchAttribute()
    cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = cluster.value.clusterDim
    size.x, size.y, size.z = RANKS, 1, 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = RANKS, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
    config.sharedMemBytes = SHARED
    config.attrs, config.numAttrs = [cluster], 1
    return Kernel(function, int(_check(driver.cuOccupancyMaxActiveClusters(function, config))))


def _bindings(name: str) -> Any:
    """cuda.bindings.driver or .nvrtc, which have no types."""
    return import_module(f"cuda.bindings.{name}")


def _check(answer: tuple[Any, ...]) -> Any:
    """What a call of the bindings returned beside its error code, which must be 0."""
    error, *result = answer
    if int(error) != 0:
        raise RuntimeError(str(error))
    return result[0] if result else None


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
