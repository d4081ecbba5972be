"""What the process keeps of freed memory."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moemerge.runtime import allocator

HOLES = """
from moemerge.runtime.allocator import give_back_freed_memory

def resident():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

blocks = [bytearray(b"x") * 100_000 for _ in range(1000)]
del blocks[:-1]  # the last one keeps the heap's end in use
before = resident()
give_back_freed_memory()
assert resident() < before - 50_000, (before, resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's own business")
def test_holes_in_the_heap_are_given_back() -> None:
    subprocess.run([sys.executable, "-c", HOLES], check=True)


def test_few_kernels_are_kept_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(allocator.KERNELS, raising=False)
    allocator.keep_few_kernels()
    assert allocator.os.environ[allocator.KERNELS] == str(allocator.KEPT_KERNELS)
    monkeypatch.setenv(allocator.KERNELS, "512")
    allocator.keep_few_kernels()
    assert allocator.os.environ[allocator.KERNELS] == "512"


ONE_HEAP = """
import threading
from moemerge.runtime.allocator import own_process, share_one_heap

def resident():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))

def work():
    bytearray(b"x") * 30_000_000

assert not share_one_heap()  # a caller's process is left as it is
own_process()
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
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's own business")
def test_threads_reuse_each_others_buffers() -> None:
    subprocess.run([sys.executable, "-c", ONE_HEAP], check=True)
