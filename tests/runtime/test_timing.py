"""Times add up by name."""

from __future__ import annotations

import time

import pytest
import torch

from moemerge.runtime.timing import Stopwatch, peak_memory

CPU = torch.device("cpu")


def test_spans_add_up() -> None:
    watch = Stopwatch(CPU)
    for _ in range(2):
        with watch.span("sleep"):
            time.sleep(0.01)
    begin = watch.mark()
    watch.add("nothing", begin, begin)
    watch.count("counted", 2.5)
    totals = watch.totals()
    assert totals["sleep"] >= 0.02
    assert totals["nothing"] == 0.0
    assert totals["counted"] == 2.5
    assert list(totals) == ["sleep", "nothing", "counted"]


def test_what_runs_beside_is_apart() -> None:
    watch = Stopwatch(CPU)
    watch.aside("read", 1.0, 100)
    watch.aside("read", 0.5, 20)
    assert (watch.beside, watch.nbytes) == ({"read": 1.5}, {"read": 120})
    assert watch.totals() == {}


def test_a_cpu_has_no_memory_of_its_own() -> None:
    assert peak_memory(CPU) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_timed_on_its_own_line() -> None:
    watch = Stopwatch(torch.device("cuda"))
    x = torch.randn(2048, 2048, device="cuda")
    with watch.span("products"):
        for _ in range(50):
            x = x @ x
            x = x / x.norm()
    assert 0 < watch.totals()["products"] < 60
    assert (peak_memory(torch.device("cuda")) or 0) >= x.numel() * 4
