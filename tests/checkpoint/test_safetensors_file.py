import os
import struct
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import load_file, save_file

from moemerge.checkpoint import format_size, parse_size
from moemerge.checkpoint.safetensors_file import (
    DTYPE_OF,
    SafetensorsFile,
    add_metadata,
    build_header,
)
from moemerge.checkpoint.tensors import TensorInfo, as_bytes
from moemerge.errors import CheckpointError, UsageError

from .conftest import write_raw


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    as_list = [list(x) if isinstance(x, tuple) else x for x in (shape, offsets)]
    return {"dtype": dtype, "shape": as_list[0], "data_offsets": as_list[1]}


@pytest.mark.parametrize("name", sorted(DTYPE_OF))
def test_every_dtype_reads_as_it_was_saved(tmp_path, name):
    dtype = DTYPE_OF[name].torch
    raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
    saved = raw.view(dtype).view(3, 2)
    save_file({"x": saved}, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.tensors["x"] == TensorInfo("x", DTYPE_OF[name], (3, 2), saved.nbytes)
    read = file.read("x")
    assert read.dtype == dtype
    assert read.shape == (3, 2)
    assert as_bytes(read) == as_bytes(saved)
    assert as_bytes(file.read("x", (1, 3))) == as_bytes(saved)[saved.nbytes // 3 :]


def test_scalars_and_empty_tensors(tmp_path):
    tensors = {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "flat": torch.empty(2, 0)}
    save_file(tensors, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.read("scalar").item() == 2.5
    assert file.read("empty").shape == (0, 3)
    assert file.read("flat", (1, 2)).shape == (1, 0)
    with pytest.raises(CheckpointError, match="rows 0:1 were requested of tensor 'scalar'"):
        file.read("scalar", (0, 1))


@pytest.mark.parametrize("skipped", [2**31, 2**32, 10**10])
def test_a_shard_of_many_gigabytes_is_read(tmp_path, skipped):
    """Its middle is a hole, which takes no room on the disk. Hub shards have 5 GB and more."""
    path, wanted = tmp_path / "x.safetensors", torch.arange(6.0).view(3, 2)
    hole = TensorInfo.of("hole", torch.float32, (skipped // 8, 2))
    header, offsets = build_header([hole, TensorInfo.of("x", torch.float32, (3, 2))])
    with path.open("wb") as file:
        file.write(header)
        file.seek(offsets["x"])
        file.write(as_bytes(wanted))
    opened = SafetensorsFile(path)
    assert opened.size > skipped
    assert opened.read("x").equal(wanted)
    assert opened.read("hole", (skipped // 8 - 1, skipped // 8)).equal(torch.zeros(1, 2))


def test_metadata_is_added_and_the_tensors_stay(tmp_path):
    path, tensors = tmp_path / "x.safetensors", {"a": torch.randn(3, 5), "b": torch.tensor(1.5)}
    save_file(tensors, path, metadata={"format": "pt"})
    add_metadata(path, {"key": "größer"})
    file = SafetensorsFile(path)
    assert file.metadata == {"format": "pt", "key": "größer"}
    assert all(file.read(name).equal(value) for name, value in tensors.items())
    assert load_file(path).keys() == tensors.keys()


@pytest.mark.parametrize("rows", [(-1, 2), (2, 1), (0, 5)])
def test_rows_outside_are_refused(tmp_path, rows):
    save_file({"x": torch.zeros(4, 2)}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="were requested of tensor 'x' of shape"):
        SafetensorsFile(tmp_path / "x.safetensors").read("x", rows)


def test_reading_into_a_buffer(tmp_path):
    saved = torch.randn(4, 3)
    save_file({"x": saved}, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    buffer = torch.empty(2, 3)
    assert file.read("x", (1, 3), buffer) is buffer
    assert torch.equal(buffer, saved[1:3])
    for wrong in (torch.empty(3, 3), torch.empty(2, 3).double(), torch.empty(3, 2).T):
        with pytest.raises(CheckpointError, match="a buffer of"):
            file.read("x", (1, 3), wrong)


ENTRY = "expected a dtype .* a shape, and data_offsets that hold it"
LIES = {
    "length beyond the file": (b"{}", b"", 1000, "claims 1000 bytes, but 2 follow"),
    "bad JSON": (b"{nonsense", b"", None, "not that of a safetensors file"),
    "nested too deep": (b"[" * 100_000, b"", None, "not that of a safetensors file"),
    "a list": ([], b"", None, "not that of a safetensors file"),
    "no offsets": ({"x": {"dtype": "F32"}}, b"", None, "not that of a safetensors file"),
    "no shape": ({"x": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4), None, ENTRY),
    "unknown dtype": ({"x": entry("BF61")}, bytes(8), None, ENTRY),
    "negative shape": ({"x": entry(shape=(-2,))}, bytes(8), None, ENTRY),
    "too many elements": ({"x": entry(shape=(2**40, 2**40))}, bytes(8), None, ENTRY),
    "three offsets": ({"x": entry(offsets=(0, 4, 8))}, bytes(8), None, ENTRY),
    "shape and bytes": ({"x": entry(shape=(3,))}, bytes(8), None, ENTRY),
    "truncated": ({"x": entry()}, bytes(5), None, "it is truncated"),
    "trailing bytes": ({"x": entry()}, bytes(9), None, "its tensors end at byte"),
    "overlap": (
        {"x": entry(), "y": entry(offsets=(4, 12))},
        bytes(12),
        None,
        "'y' begins at byte 4 of the data, expected 8",
    ),
    "gap": ({"x": entry(offsets=(4, 12))}, bytes(12), None, "'x' begins at byte 4"),
    "a name for two tensors": (
        b'{"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
        b'"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
        bytes(2),
        None,
        "'x' begins at byte 1 of the data, expected 0",
    ),
}


@pytest.mark.parametrize("case", LIES)
def test_a_header_that_lies_is_refused(tmp_path, case):
    header, data, length, message = LIES[case]
    path = write_raw(tmp_path / "lie.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)
    assert caught.value.hint


def test_an_oversized_header_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "big.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(300_000_000)  # sparse
    with pytest.raises(CheckpointError, match="at most 100000000 are allowed"):
        SafetensorsFile(path)


def test_tiny_missing_and_unreadable_files(tmp_path):
    (tmp_path / "tiny.safetensors").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="has 3 bytes, too few"):
        SafetensorsFile(tmp_path / "tiny.safetensors")
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        SafetensorsFile(tmp_path / "none.safetensors")


def test_a_file_cut_after_opening_is_a_short_read(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(100)}, path)
    file = SafetensorsFile(path)
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(CheckpointError, match="ends after 390 of 400 bytes"):
        file.read("x")


def test_descriptors_are_closed(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": torch.zeros(2)}, path)
    bad = write_raw(tmp_path / "bad.safetensors", b"{oops")
    before = len(os.listdir("/proc/self/fd"))
    file = SafetensorsFile(path)
    with pytest.raises(CheckpointError):
        SafetensorsFile(bad)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    file.close()
    file.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(CheckpointError, match="was closed before 'x' was read"):
        file.read("x")
    SafetensorsFile(path)  # dropped at once: collected with its descriptor
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_share_one_descriptor(tmp_path):
    saved = {f"t{i}": torch.randn(50, 64) for i in range(20)}
    save_file(saved, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")

    def check(job):
        name, row = f"t{job % 20}", job % 49
        return torch.equal(file.read(name, (row, row + 2)), saved[name][row : row + 2])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(2000)))


def test_wider_dtypes_come_first_so_that_all_are_aligned():
    infos = [
        TensorInfo.of("flag", torch.bool, (3,)),
        TensorInfo.of("half", torch.bfloat16, (3,)),
        TensorInfo.of("wide", torch.float64, (1,)),
    ]
    _, offsets = build_header(infos)
    assert all(offsets[i.name] % i.dtype.itemsize == 0 for i in infos)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("5GB", 5 * 10**9),
        ("500MB", 5 * 10**8),
        ("5B", 5 * 10**9),
        ("2GiB", 2 * 2**30),
        ("1.5 gb", 15 * 10**8),
        ("12345", 12345),
        ("4k", 4000),
        ("9007199254740993", 9007199254740993),
        (7, 7),
    ],
)
def test_sizes(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "five", "5XB", "-5GB", "0", "0.1", "GB", True, "5 G B", "9" * 5000, f"{10**400}.5"]
)
def test_no_sizes(text):
    with pytest.raises(UsageError, match="5GB"):
        parse_size(text)


def test_sizes_for_people():
    assert [format_size(n) for n in (12, 1500, 13 * 10**8)] == ["12 bytes", "1.5 kB", "1.3 GB"]
