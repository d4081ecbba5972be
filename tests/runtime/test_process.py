"""What the process keeps of freed memory, and errors of exhausted memory."""

import subprocess
import sys

import pytest
import torch

from moemerge.runtime.devices import is_out_of_memory

HOLES = """
from moemerge.runtime.process import give_back_freed_memory

def resident():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

blocks = [bytearray(b"x") * 100_000 for _ in range(1000)]
del blocks[:-1]  # the last one keeps the heap's end in use
before = resident()
give_back_freed_memory()
assert resident() < before - 50_000, (before, resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_holes_in_the_heap_are_given_back():
    subprocess.run([sys.executable, "-c", HOLES], check=True)


def test_libraries_of_cuda_run_out_of_memory_too():
    failed = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert is_out_of_memory(RuntimeError(failed))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError(failed))
