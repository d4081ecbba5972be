import errno
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from moemerge.checkpoint import Checkpoint, CheckpointWriter, TensorInfo
from moemerge.checkpoint.safetensors_file import DTYPE_OF
from moemerge.checkpoint.tensors import as_bytes
from moemerge.checkpoint.writer import plan_shards
from moemerge.errors import CheckpointError
from processes import python

from .conftest import sample_tensors

BIG = 10**12


def infos(tensors):
    return [TensorInfo.of(name, t.dtype, t.shape) for name, t in tensors.items()]


def writer(out, tensors, shard_bytes=BIG):
    return CheckpointWriter(out, infos(tensors), shard_bytes=shard_bytes, overwrite=False)


def test_one_shard(tmp_path):
    tensors = sample_tensors()
    with writer(tmp_path / "out", tensors) as w:
        for name, tensor in tensors.items():
            w.write(name, tensor)
        w.add_bytes("config.json", b"{}")
        assert not (tmp_path / "out").exists()
        w.commit()
    assert sorted(os.listdir(tmp_path)) == ["out"]
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[n], t) and loaded[n].dtype == t.dtype for n, t in tensors.items())
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_several_shards_in_the_given_order(tmp_path):
    tensors = {f"t{i}": torch.full((10,), float(i)) for i in range(5)}  # 40 bytes each
    with writer(tmp_path / "out", tensors, shard_bytes=80) as w:
        for name in reversed(tensors):
            w.write(name, tensors[name])
        w.add_bytes("config.json", b"{}")
        w.commit()
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 200
    first, last = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"
    assert (index["weight_map"]["t0"], index["weight_map"]["t1"]) == (first, first)
    assert index["weight_map"]["t4"] == last
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert all(torch.equal(checkpoint[n], t) for n, t in tensors.items())


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path):
    sizes = [10, 500, 10, 10]
    shards = plan_shards(
        [TensorInfo.of(f"t{i}", torch.uint8, (n,)) for i, n in enumerate(sizes)], 50
    )
    assert [[t.name for t in group] for group in shards.values()] == [["t0"], ["t1"], ["t2", "t3"]]


def test_every_dtype_round_trips(tmp_path):
    tensors = {
        name: (torch.arange(6 * d.itemsize, dtype=torch.uint8) % 2).view(d.torch).view(3, 2)
        for name, d in DTYPE_OF.items()
    }
    tensors |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 4)}
    with writer(tmp_path / "out", tensors) as w:
        for name, tensor in tensors.items():
            w.write(name, tensor)
        w.commit()
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in tensors.items():
        assert (loaded[name].dtype, loaded[name].shape) == (tensor.dtype, tensor.shape)
        assert as_bytes(loaded[name]) == as_bytes(tensor)


def test_blocks_of_rows_from_many_threads(tmp_path):
    tensors = {f"t{i}": torch.randn(64, 3, 5) for i in range(6)}
    jobs = [(name, row) for name in tensors for row in range(0, 64, 4)]
    order = torch.randperm(len(jobs), generator=torch.Generator().manual_seed(0)).tolist()
    with writer(tmp_path / "out", tensors, shard_bytes=10_000) as w, ThreadPoolExecutor(8) as pool:

        def write(job):
            name, row = jobs[job]
            w.write(name, tensors[name][row : row + 4], row)

        list(pool.map(write, order))
        w.add_bytes("config.json", b"{}")
        w.commit()
    checkpoint = Checkpoint.open(tmp_path / "out")
    assert all(torch.equal(checkpoint[n], t) for n, t in tensors.items())


def test_views_are_written_as_they_look(tmp_path):
    base = torch.randn(4, 6)
    with writer(tmp_path / "out", {"x": base.T}) as w:
        w.write("x", base.T)
        w.commit()
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["x"], base.T)


def test_commit_refuses_an_incomplete_output(tmp_path):
    with writer(tmp_path / "out", {"x": torch.zeros(4, 2), "y": torch.zeros(1)}) as w:
        w.write("x", torch.zeros(1, 2), 0)
        w.write("x", torch.zeros(1, 2), 2)
        assert w.missing() == {"x": [(1, 2), (3, 4)], "y": [(0, 1)]}
        with pytest.raises(CheckpointError, match=r"2 of 2 tensors lack rows.*'x' \(rows 1:2\)"):
            w.commit()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("second", [(0, 2), (1, 3), (2, 4), (0, 4)])
def test_a_row_is_written_once(tmp_path, second):
    with writer(tmp_path / "out", {"x": torch.zeros(4, 2)}) as w:
        w.write("x", torch.zeros(2, 2), 1)
        with pytest.raises(CheckpointError, match="written a second time"):
            w.write("x", torch.zeros(second[1] - second[0], 2), second[0])


@pytest.mark.parametrize(
    ("tensor", "row"),
    [
        (torch.zeros(4, 3), 0),
        (torch.zeros(2, 2), 3),
        (torch.zeros(2, 2), -1),
        (torch.zeros(4, 2).half(), 0),
        (torch.zeros(8), 0),
        (torch.tensor(0.0), 0),
    ],
)
def test_what_was_not_declared_is_refused(tmp_path, tensor, row):
    with writer(tmp_path / "out", {"x": torch.zeros(4, 2)}) as w:
        with pytest.raises(CheckpointError, match="was written at row"):
            w.write("x", tensor, row)
        with pytest.raises(CheckpointError, match="'y' was not declared"):
            w.write("y", torch.zeros(1))


def test_impossible_declarations(tmp_path):
    x = TensorInfo.of("x", torch.float32, (1,))
    for bad in ([x, x], [TensorInfo.of("__metadata__", torch.float32, (1,))], []):
        with pytest.raises(CheckpointError):
            CheckpointWriter(tmp_path / "out", bad, shard_bytes=BIG, overwrite=False)
    with pytest.raises(CheckpointError, match="which safetensors cannot store"):
        plan_shards([TensorInfo.of("x", torch.complex128, (1,))], BIG)
    assert os.listdir(tmp_path) == []


def test_an_exception_leaves_nothing(tmp_path):
    out = tmp_path / "new" / "parents" / "out"
    with pytest.raises(RuntimeError), writer(out, {"x": torch.zeros(1)}):
        raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_nothing_is_written_after_the_end(tmp_path):
    with writer(tmp_path / "out", {"x": torch.zeros(1)}) as w:
        w.write("x", torch.zeros(1))
        w.commit()
    for use in (lambda: w.write("x", torch.zeros(1)), lambda: w.add_bytes("a", b""), w.commit):
        with pytest.raises(CheckpointError, match="closed already"):
            use()
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_other_files(tmp_path):
    (tmp_path / "tokenizer.json").write_text("T")
    with writer(tmp_path / "out", {"x": torch.zeros(1)}) as w:
        w.write("x", torch.zeros(1))
        w.add_file(tmp_path / "tokenizer.json")
        w.add_file(tmp_path / "tokenizer.json", "additional_chat_templates/a.jinja")
        for bad in ("../escape", "/abs", "model.safetensors", "model.safetensors.index.json"):
            with pytest.raises(CheckpointError):
                w.add_bytes(bad, b"")
        w.commit()
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "T"
    assert (tmp_path / "out" / "additional_chat_templates" / "a.jinja").read_text() == "T"
    assert not (tmp_path / "escape").exists()


KILLED = """
import os, signal, sys, torch
from pathlib import Path
from moemerge.checkpoint import CheckpointWriter, TensorInfo
infos = [TensorInfo.of(f"t{i}", torch.float32, (1000,)) for i in range(100)]
w = CheckpointWriter(Path(sys.argv[1]), infos, shard_bytes=10**4, overwrite=True)
for i in range(50):
    w.write(f"t{i}", torch.zeros(1000))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("existing", [False, True])
def test_a_killed_run_leaves_out_as_it_was(tmp_path, existing):
    out = tmp_path / "out"
    if existing:
        out.mkdir()
        (out / "config.json").write_text("old")
    assert python(KILLED, out).returncode == -signal.SIGKILL
    assert out.exists() == existing
    partial = [p for p in os.listdir(tmp_path) if p != "out"]
    assert len(partial) == 1  # what the killed run left, hidden
    assert partial[0].startswith(".out.partial-")
    with CheckpointWriter(
        out, infos({"x": torch.ones(1)}), shard_bytes=BIG, overwrite=existing
    ) as w:  # the next run clears it away
        assert not (tmp_path / partial[0]).exists()
        w.write("x", torch.ones(1))
        w.commit()
    assert os.listdir(tmp_path) == ["out"]
    assert os.listdir(out) == ["model.safetensors"]


def test_the_partial_folder_of_a_living_run_is_left_alone(tmp_path):
    with writer(tmp_path / "out", {"x": torch.zeros(1)}) as first:
        with writer(tmp_path / "out", {"x": torch.ones(1)}) as second:
            first.write("x", torch.zeros(1))
            second.write("x", torch.ones(1))
            second.commit()
        with pytest.raises(CheckpointError, match="exists"):
            first.commit()
    assert os.listdir(tmp_path) == ["out"]
    assert load_file(tmp_path / "out" / "model.safetensors")["x"].item() == 1


FULL = """
import resource, signal, sys, torch
from pathlib import Path
from moemerge.checkpoint import CheckpointWriter, TensorInfo
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
infos = [TensorInfo.of(f"t{i}", torch.float32, (1000,)) for i in range(3)]
with CheckpointWriter(Path(sys.argv[1]), infos, shard_bytes=10**4, overwrite=True) as w:
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
    try:
        for i in range(3):
            w.write(f"t{i}", torch.zeros(1000))
    except Exception as error:
        print(type(error).__name__, error)
    try:
        w.commit()
    except Exception as error:
        print(type(error).__name__, error)
"""


def test_a_failing_write_stops_everything(tmp_path):
    """A file-size limit fails inside pwrite, as a full disk does."""
    result = python(FULL, tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("CheckpointError") == 2, result
    assert "File too large" in result.stdout
    assert os.listdir(tmp_path) == []


def test_a_full_disk_is_explained(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with writer(tmp_path / "out", {"x": torch.zeros(1)}) as w:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointError, match=r"No space left on device\n.*free some space"):
            w.write("x", torch.zeros(1))
        monkeypatch.undo()
        with pytest.raises(CheckpointError, match="No space left"):
            w.commit()
    assert os.listdir(tmp_path) == []


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:5000], at))
    value = torch.arange(30_001, dtype=torch.int32)
    with writer(tmp_path / "out", {"w": value}) as w:
        w.write("w", value)
        w.commit()
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["w"], value)


def test_abort_waits_for_running_writes(tmp_path, monkeypatch):
    real, finished = os.pwrite, []

    def slow(*args):
        time.sleep(0.2)
        finished.append(True)
        return real(*args)

    w = writer(tmp_path / "out", {"x": torch.zeros(1)})
    monkeypatch.setattr(os, "pwrite", slow)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(w.write, "x", torch.zeros(1))
        time.sleep(0.05)
        w.abort()
        assert finished
        job.result()
    assert os.listdir(tmp_path) == []


def test_an_interrupted_write_cannot_be_committed(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    with writer(tmp_path / "out", {"x": torch.zeros(1)}) as w:
        monkeypatch.setattr(os, "pwrite", interrupt)
        with pytest.raises(KeyboardInterrupt):
            w.write("x", torch.zeros(1))
        monkeypatch.undo()
        with pytest.raises(CheckpointError, match="was interrupted"):
            w.commit()
    assert os.listdir(tmp_path) == []


def test_a_missing_companion_is_named(tmp_path):
    with (
        writer(tmp_path / "out", {"x": torch.zeros(1)}) as w,
        pytest.raises(CheckpointError, match=r"gone\.json cannot be read"),
    ):
        w.add_file(tmp_path / "gone.json")
