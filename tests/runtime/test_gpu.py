"""Deterministic operations for a while, and everything as it was afterwards; queues of threads."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moemerge.runtime.devices import OwnStream, deterministic


def state():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )


def test_it_ends_with_the_context():
    before = state()
    with deterministic(torch.device("cuda")):
        assert state() == (True, True, False)
    assert state() == before

    def fail():
        with deterministic(torch.device("cuda")):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert state() == before


def test_threads_have_a_queue_each_on_a_gpu_and_none_on_a_cpu():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own = OwnStream(device)

    def current(_):
        with own.entered():
            return torch.cuda.current_stream().cuda_stream if device.type == "cuda" else None

    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        here, again, there = [next(pool.map(current, [0])) for pool in (first, first, second)]
    assert here == again
    assert (here == there) is (device.type == "cpu")
