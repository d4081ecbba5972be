"""Stopwatches, progress and dtypes."""

import time

import pytest
import torch

from moemerge.errors import UsageError
from moemerge.runtime.dtypes import FLOATS, Dtype, dtype_name, parse_dtype
from moemerge.runtime.progress import TimeLeft, counted
from moemerge.runtime.timing import Stopwatch, peak_memory

CPU = torch.device("cpu")


def test_spans_add_up():
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


def test_the_time_left_is_that_of_steps_like_the_timed_ones(monkeypatch):
    clock = iter([100.0, 103.0, 105.0, 106.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    left = TimeLeft(5)
    left.skip()  # of an earlier run
    assert [left.step() for _ in range(4)] == ["", ", 6 s left", ", 2 s left", ""]


@pytest.mark.gpu
def test_a_gpu_is_timed_on_its_own_line():
    watch = Stopwatch(torch.device("cuda"))
    x = torch.randn(2048, 2048, device="cuda")
    with watch.span("products"):
        for _ in range(50):
            x = x @ x
            x = x / x.norm()
    assert 0 < watch.totals()["products"] < 60
    assert (peak_memory(torch.device("cuda")) or 0) >= x.numel() * 4


def test_one_is_no_plural():
    assert counted(1, "row") == "1 row"
    assert [counted(n, "row") for n in (0, 2, 12345)] == ["0 rows", "2 rows", "12,345 rows"]
    assert counted(1, "row holds", "rows hold") == "1 row holds"
    assert counted(2, "row holds", "rows hold") == "2 rows hold"


@pytest.mark.parametrize("dtype", Dtype)
def test_a_dtype_is_what_torch_says(dtype):
    assert dtype.itemsize == dtype.torch.itemsize
    assert dtype.is_floating_point == dtype.torch.is_floating_point
    assert Dtype.of(dtype.torch) is Dtype.of(dtype) is dtype
    assert str(dtype) == f"{dtype}" == dtype_name(dtype.torch) == dtype_name(dtype)


def test_names_that_weights_can_have():
    assert parse_dtype("torch.bfloat16") is parse_dtype("bfloat16") is Dtype.BFLOAT16
    assert [d.torch for d in FLOATS] == [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
    ]
    for wrong in ("int8", "float8_e5m2", "bf17"):
        with pytest.raises(UsageError, match=f"unknown dtype '{wrong}'"):
            parse_dtype(wrong)
