"""What the process keeps of freed memory; threads that the system refuses."""

import _thread
import subprocess
import sys
import threading

import pytest
import torch

from moemerge.checkpoint.tensors import TensorInfo
from moemerge.checkpoint.writer import CheckpointWriter
from moemerge.errors import ResourceError
from moemerge.runtime import process
from moemerge.runtime.devices import is_out_of_memory
from moemerge.runtime.process import start_thread, thread_pool

RESIDENT = """
def resident():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
"""
HOLES = """
from moemerge.runtime.process import give_back_freed_memory

blocks = [bytearray(b"x") * 100_000 for _ in range(1000)]
del blocks[:-1]  # the last one keeps the heap's end in use
before = resident()
give_back_freed_memory()
assert resident() < before - 50_000, (before, resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's own business")
def test_holes_in_the_heap_are_given_back():
    subprocess.run([sys.executable, "-c", RESIDENT + HOLES], check=True)


def test_few_kernels_are_kept_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv(process.KERNEL_CACHE, raising=False)
    process.limit_kernel_cache()
    assert process.os.environ[process.KERNEL_CACHE] == str(process.CACHED_KERNELS)
    monkeypatch.setenv(process.KERNEL_CACHE, "512")
    process.limit_kernel_cache()
    assert process.os.environ[process.KERNEL_CACHE] == "512"


ONE_HEAP = """
import threading
from moemerge.runtime.process import (
    give_back_freed_memory, give_back_large_buffers, configure_process, share_one_heap
)

def work():
    bytearray(b"x") * 30_000_000

assert not share_one_heap()  # a caller's process is left as it is
configure_process()
assert share_one_heap()
sizes = []
for _ in range(6):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    sizes.append(resident())
# Each thread reuses what the one before freed: nothing is given back, and nothing grows.
assert sizes[-1] < sizes[0] + 5_000, sizes
assert sizes[0] > 25_000, sizes
# Until large buffers are wanted back.
give_back_large_buffers()
give_back_freed_memory()
before = resident()
kept = []
for _ in range(6):
    work()
    kept.append(bytearray(100))  # what lies above a freed buffer keeps none of it
assert resident() < before + 5_000, (before, resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's own business")
def test_threads_reuse_each_others_buffers():
    subprocess.run([sys.executable, "-c", RESIDENT + ONE_HEAP], check=True)


def refuse_threads_after(monkeypatch, allowed):
    """As under `ulimit -u`: the system gives `allowed` more threads and no others."""
    start, given = threading.Thread.start, []

    def limited(thread):
        if len(given) >= allowed:
            raise _thread.error("can't start new thread")
        given.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


def test_all_threads_run_from_the_start():
    with thread_pool(3, "test") as pool:
        names = {t.name for t in threading.enumerate() if t.name.startswith("test")}
        assert len(names) == 3
        assert pool.submit(lambda: 7).result() == 7


@pytest.mark.parametrize("allowed", [0, 1])
def test_a_refused_thread_is_an_error_of_ours(monkeypatch, allowed):
    refuse_threads_after(monkeypatch, allowed)
    with pytest.raises(ResourceError, match="starts no thread for test"):
        thread_pool(2, "test")


def test_a_thread_without_memory_is_not_started(monkeypatch):
    """It would die before it began, and whoever started it would wait for ever."""
    monkeypatch.setattr(process, "THREAD_BYTES", 2**60)
    with pytest.raises(ResourceError, match="starts no thread for test"):
        thread_pool(2, "test")
    thread = threading.Thread(target=int, name="one")
    with pytest.raises(ResourceError, match="starts no thread for one"):
        start_thread(thread)
    assert not thread.is_alive()


@pytest.mark.parametrize("allowed", range(2))
def test_a_writer_without_threads_leaves_nothing_behind(monkeypatch, tmp_path, allowed):
    """It used to wait for ever for writes that no thread would do."""
    values = torch.arange(2**19, dtype=torch.float32)
    refuse_threads_after(monkeypatch, allowed)
    info = TensorInfo.of("w", values.dtype, values.shape)
    try:
        with CheckpointWriter(
            tmp_path / "out", [info], shard_bytes=2**30, overwrite=False
        ) as writer:
            writer.write("w", values)
            writer.commit()
    except ResourceError:
        assert list(tmp_path.iterdir()) == []
    else:
        assert allowed == 1  # the thread that syncs
        assert (tmp_path / "out").is_dir()


def test_libraries_of_cuda_run_out_of_memory_too():
    failed = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    assert is_out_of_memory(RuntimeError(failed))
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))
    assert not is_out_of_memory(ValueError(failed))
