"""Write a checkpoint: declare all tensors first, then fill them in any order from any thread."""

from __future__ import annotations

import bisect
import json
import os
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from moemerge.checkpoint.folder import INDEX, SINGLE
from moemerge.checkpoint.output import OutputFolder, output_error, writing
from moemerge.checkpoint.safetensors_file import METADATA, build_header, dtype_label
from moemerge.checkpoint.tensors import RowRange, TensorInfo, as_bytes
from moemerge.errors import CheckpointError, MoeMergeError
from moemerge.registry import did_you_mean
from moemerge.runtime.checksums import PART_BYTES, part_sum
from moemerge.runtime.files import write_at, write_file
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class _Shard:
    path: Path
    fd: int
    left: list[int]  # bytes still to be written, by part: parts have their own checksums

    @classmethod
    def of(cls, path: Path, fd: int, nbytes: int) -> _Shard:
        left = [min(PART_BYTES, nbytes - at) for at in range(0, nbytes, PART_BYTES)]
        return cls(path, fd, left)

    def written(self, start: int, stop: int) -> Iterator[int]:
        """Record that these bytes were written, and yield where complete parts begin."""
        for at in range(start - start % PART_BYTES, stop, PART_BYTES):
            part = at // PART_BYTES
            self.left[part] -= min(stop, at + PART_BYTES) - max(start, at)
            if self.left[part] == 0:
                yield at


@dataclass
class _Progress:
    """Row ranges of a tensor that are written or being written: disjoint, sorted, joined."""

    info: TensorInfo
    shard: _Shard
    offset: int
    spans: list[RowRange] = field(default_factory=list)

    def claim(self, start: int, stop: int) -> None:
        at = bisect.bisect_left(self.spans, (start, stop))
        before = self.spans[at - 1] if at > 0 else (0, -1)
        after = self.spans[at] if at < len(self.spans) else None
        if before[1] > start or (after is not None and after[0] < stop):
            raise CheckpointError(
                f"rows {start}:{stop} of tensor {self.info.name!r} are written a second time"
            )
        if before[1] == start:
            at, start = at - 1, before[0]
            del self.spans[at]
        if after is not None and after[0] == stop:
            stop = after[1]
            del self.spans[at]
        self.spans.insert(at, (start, stop))

    def gaps(self) -> list[RowRange]:
        if self.info.nbytes == 0:
            return []
        edges = [0, *(edge for span in self.spans for edge in span), self.info.rows]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return [(start, stop) for start, stop in pairs if start < stop]


class CheckpointWriter:
    """Writes safetensors shards next to OUT and renames them into place on `commit`.

    A context manager: leaving it without a commit removes everything. `folder` is the folder of
    another process's writer for the same tensors. This writer writes some of them there and hands
    them over; the other commits.
    """

    def __init__(
        self,
        out: Path,
        tensors: Sequence[TensorInfo],
        *,
        shard_bytes: int,
        overwrite: bool,
        inputs: Sequence[Path] = (),
        folder: Path | None = None,
    ) -> None:
        shards = plan_shards(tensors, shard_bytes)
        self.out = out
        self._tensors: dict[str, _Progress] = {}
        self._shards: list[_Shard] = []
        self._condition = threading.Condition()
        self._writing = 0
        self._closed = False
        self._error: MoeMergeError | None = None
        self._sums: dict[tuple[str, int], Future[int]] = {}
        self._pool = ThreadPoolExecutor(1, "moemerge-checksum")
        self._folder: OutputFolder | None = None
        if folder is None:
            self._folder = OutputFolder(out, overwrite=overwrite, inputs=inputs)
        self.folder = folder or self._own_folder.path
        try:
            with writing(out):
                for name, infos in shards.items():
                    self._create(name, infos)
        except BaseException:
            self.abort()
            raise
        self._index = None if len(shards) == 1 else _index(shards)

    @property
    def _own_folder(self) -> OutputFolder:
        assert self._folder is not None  # otherwise the folder is another process's
        return self._folder

    def _create(self, name: str, infos: Sequence[TensorInfo]) -> None:
        header, offsets = build_header(infos)
        nbytes = len(header) + sum(info.nbytes for info in infos)
        new = self._folder is not None  # otherwise another process's
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if new else 0)
        path = self.folder / name
        shard = _Shard.of(path, os.open(path, flags, 0o666), nbytes)
        self._shards.append(shard)
        if new:
            os.ftruncate(shard.fd, nbytes)
            self._put(shard, memoryview(header), 0)
        for info in infos:
            self._tensors[info.name] = _Progress(info, shard, offsets[info.name])

    def write(self, name: str, tensor: Tensor, row: int = 0) -> None:
        """Write a tensor, or a block of its leading-axis rows from `row` on.

        Each row is written once; shape and dtype must be those declared.
        """
        progress = self._progress(name)
        info = progress.info
        rows = tensor.shape[0] if tensor.dim() else 1
        info.require_fit(tensor, row)
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        with self._condition:
            self._check_open()
            progress.claim(row, row + rows)
            self._writing += 1
        # An interrupt is also a failure: its rows are claimed but not on disk.
        problem: MoeMergeError | None = CheckpointError(f"writing {self.out} was interrupted")
        try:
            self._put(progress.shard, as_bytes(data), progress.offset + row * info.row_bytes)
            problem = None
        except OSError as error:
            problem = output_error(error, self.out)
            raise problem from error
        finally:
            self._written(problem)

    def _put(self, shard: _Shard, data: memoryview, offset: int) -> None:
        write_at(shard.fd, data, offset)
        with self._condition:
            complete = list(shard.written(offset, offset + len(data)))
            if self._closed:
                return
            for at in complete:
                summing = self._pool.submit(part_sum, shard.path, at)  # in the page cache yet
                self._sums[shard.path.name, at] = summing

    def _written(self, problem: MoeMergeError | None) -> None:
        with self._condition:
            self._error = self._error or problem
            self._writing -= 1
            self._condition.notify_all()

    def _progress(self, name: str) -> _Progress:
        if name not in self._tensors:
            raise CheckpointError(
                f"tensor {name!r} was not declared for {self.out}"
                f"{did_you_mean(name, self._tensors)}"
            )
        return self._tensors[name]

    def _check_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise CheckpointError(f"the output {self.out} was closed already")

    def missing(self) -> dict[str, list[RowRange]]:
        """Return the row ranges that are not written yet, by tensor."""
        with self._condition:
            gaps = {name: progress.gaps() for name, progress in self._tensors.items()}
        return {name: spans for name, spans in gaps.items() if spans}

    def add_bytes(self, filename: str, data: bytes) -> None:
        """Add a small file (config, report, card) to the output."""
        self._check_added(filename)
        self._own_folder.add_bytes(filename, data)

    def add_file(self, source: Path, name: str | None = None) -> None:
        """Copy a file into the output, under its own name or another."""
        self._check_added(name if name is not None else source.name)
        self._own_folder.add_file(source, name)

    def _check_added(self, filename: str) -> None:
        with self._condition:
            self._check_open()
        path = self.folder / filename
        if filename == INDEX or any(shard.path == path for shard in self._shards):
            raise CheckpointError(f"{filename} is written by the checkpoint writer itself")

    def hand_over(self) -> list[str]:
        """Close a writer of another writer's folder.

        Return the names of the complete tensors.
        """
        self._wait_for_writes()
        missing = self.missing()
        self._release()
        return [name for name, progress in self._tensors.items() if name not in missing]

    def take_over(self, names: Collection[str]) -> None:
        """Mark tensors as written that another process handed over."""
        with self._condition:
            for name in names:
                progress = self._progress(name)
                if progress.gaps():
                    progress.claim(0, progress.info.rows)

    def _wait_for_writes(self) -> None:
        with self._condition:
            self._check_open()
            self._condition.wait_for(lambda: self._writing == 0)
            self._check_open()

    def commit(self) -> None:
        """Check that every tensor is complete, and rename into place."""
        self._wait_for_writes()
        missing = self.missing()
        if missing:
            name, spans = next(iter(missing.items()))
            raise CheckpointError(
                f"{self.out} is incomplete: {len(missing)} of {len(self._tensors)} tensors lack "
                f"rows, the first is {name!r} (rows {spans[0][0]}:{spans[0][1]})"
            )
        try:
            with writing(self.out):
                if self._index is not None:
                    write_file(self.folder / INDEX, self._index)
                sums = {part: summing.result() for part, summing in self._sums.items()}
            self._release()
            self._own_folder.commit(sums)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Wait for running writes and remove everything. Does nothing after a commit."""
        self._release()
        if self._folder is not None:
            self._folder.abort()

    def _release(self) -> None:
        with self._condition:
            if self._closed:
                return
            self._closed = True
            self._condition.wait_for(lambda: self._writing == 0)
        self._pool.shutdown(wait=True, cancel_futures=True)
        for shard in self._shards:
            os.close(shard.fd)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


def plan_shards(tensors: Sequence[TensorInfo], shard_bytes: int) -> dict[str, list[TensorInfo]]:
    """Return the tensors of each shard, in the given order. A tensor is never split."""
    names: set[str] = set()
    groups: list[list[TensorInfo]] = []
    filled = 0
    for info in tensors:
        if info.name in names or info.name == METADATA:
            raise CheckpointError(
                f"an output cannot hold {info.name!r} (twice, or a reserved name)"
            )
        dtype_label(info)  # refuses dtypes that safetensors cannot store
        names.add(info.name)
        if not groups or (filled and filled + info.nbytes > shard_bytes):
            groups.append([])
            filled = 0
        groups[-1].append(info)
        filled += info.nbytes
    if not groups:
        raise CheckpointError("an output needs at least one tensor")
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    count = len(groups)
    return {f"model-{i:05d}-of-{count:05d}.safetensors": group for i, group in enumerate(groups, 1)}


def _index(shards: dict[str, list[TensorInfo]]) -> bytes:
    total = sum(info.nbytes for infos in shards.values() for info in infos)
    weight_map = {info.name: file for file, infos in shards.items() for info in infos}
    document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(document, indent=2) + "\n").encode()
