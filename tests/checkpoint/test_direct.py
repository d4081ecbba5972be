"""Writing past the page cache: the same bytes in any alignment, and errors that are not lost."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from moemerge.checkpoint import CheckpointWriter, TensorInfo, direct
from moemerge.checkpoint import writer as writer_module
from moemerge.errors import CheckpointError


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors take the way of large ones, through many buffers."""
    monkeypatch.setattr(writer_module, "LEAST_BYTES", 1)
    monkeypatch.setattr(direct, "BUFFER_BYTES", 3 * direct.PAGE)


def sample() -> dict[str, Tensor]:
    """Sizes around pages and buffers; every second one shifts its successors off the pages."""
    g = torch.Generator().manual_seed(0)
    sizes = [1, 7, 4095, 4096, 4097, 8191, 3 * 4096, 40_000, 2, 100_001, 4096, 3]
    return {f"t{i}": torch.randint(0, 256, (n,), generator=g).byte() for i, n in enumerate(sizes)}


def write(out: Path, tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    infos = [TensorInfo.of(name, t.dtype, t.shape) for name, t in tensors.items()]
    with CheckpointWriter(out, infos, shard_bytes=10**12, overwrite=False, **options) as writer:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda item: writer.write(*item), tensors.items()))
        writer.add_bytes("config.json", b"{}")
        writer.commit()
    return load_file(out / "model.safetensors")


@pytest.mark.parametrize("straight", [True, False])
def test_every_byte_arrives(tmp_path: Path, straight: bool) -> None:
    tensors = sample()
    found = write(tmp_path / "out", tensors, direct=straight)
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_both_ways_give_the_same_file(tmp_path: Path) -> None:
    tensors = sample()
    write(tmp_path / "a", tensors, direct=True)
    write(tmp_path / "b", tensors, direct=False)
    files = [(tmp_path / n / "model.safetensors").read_bytes() for n in "ab"]
    assert files[0] == files[1]


@pytest.mark.parametrize("offset", [0, 1, 4095, 4096, 5000])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 9000, 50_000])
def test_any_alignment(tmp_path: Path, offset: int, size: int) -> None:
    data = torch.arange(size).byte()
    file = direct.OutputFile(tmp_path / "file", direct=True)
    buffers = direct.Buffers()
    try:
        for buffer, part, at in buffers.filled(data, offset):
            file.write_aligned(part, at)
            buffers.give_back(buffer)
    finally:
        buffers.close()
        file.close()
    written = (tmp_path / "file").read_bytes()
    assert written[offset:] == bytes(data.tolist())


def test_a_file_system_that_refuses_is_written_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open, real_pwrite = os.open, os.pwrite
    straight = set()

    def opened(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        fd = real_open(path, flags & ~direct._DIRECT, *rest, **named)
        if flags & direct._DIRECT:
            straight.add(fd)
        return fd

    def refused(fd: int, data: Any, offset: int) -> int:
        if fd in straight:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_pwrite(fd, data, offset)

    monkeypatch.setattr(direct, "_DIRECT", direct._DIRECT or 1 << 30)
    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "pwrite", refused)
    tensors = sample()
    found = write(tmp_path / "out", tensors)
    assert straight
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_writes_that_come_up_short_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[:5000], at))
    tensors = sample()
    found = write(tmp_path / "out", tensors)
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_buffers_serve_threads_in_either_inference_mode(tmp_path: Path) -> None:
    tensors = sample()
    infos = [TensorInfo.of(name, t.dtype, t.shape) for name, t in tensors.items()]
    with CheckpointWriter(tmp_path / "out", infos, shard_bytes=10**12, overwrite=False) as writer:
        for i, (name, value) in enumerate(tensors.items()):
            with torch.inference_mode(i % 2 == 0):
                writer.write(name, value)
        writer.commit()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_an_error_behind_the_writers_back_ends_in_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = sample()
    real = os.pwrite

    def full(fd: int, data: Any, at: int) -> int:
        if at > 50_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="No space left"):
        write(tmp_path / "out", tensors)
    assert list(tmp_path.iterdir()) == []
