from __future__ import annotations

import _thread
import threading

import pytest
import torch

from moemerge.checkpoint.tensors import TensorInfo
from moemerge.checkpoint.writer import CheckpointWriter
from moemerge.errors import ResourceError
from moemerge.runtime.threads import thread_pool


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


@pytest.mark.parametrize("allowed", range(4))
def test_a_writer_without_threads_leaves_nothing_behind(monkeypatch, tmp_path, allowed):
    """It used to wait for ever for writes that no thread would do."""
    values = torch.arange(2**19, dtype=torch.float32)  # large enough to go past the page cache
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
        assert allowed == 3  # two that write, one that syncs
        assert (tmp_path / "out").is_dir()
