"""Copy a checkpoint with some tensors replaced, such as calibrated routers."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from moemerge.checkpoint.folder import INDEX, TensorFile, companion_files, is_weights, place_in
from moemerge.checkpoint.output import OutputFolder, copy_file, writing
from moemerge.checkpoint.quantised.formats import FILE as QUANTISATION_FILE
from moemerge.checkpoint.quantised.tensor import QuantisedInfo
from moemerge.checkpoint.reader import AdaptedCheckpoint, Checkpoint
from moemerge.checkpoint.requantise import RoundingErrors
from moemerge.checkpoint.safetensors_file import SafetensorsFile
from moemerge.checkpoint.tensors import TensorInfo, as_bytes
from moemerge.checkpoint.writer import CheckpointWriter
from moemerge.errors import CheckpointError
from moemerge.runtime.files import write_at

if TYPE_CHECKING:
    from torch import Tensor

Quantised = Literal["keep", "floats", "same"]
DEFAULT_SHARD_BYTES: Final = 5_000_000_000
_COPY_BLOCK_BYTES: Final = 64 * 2**20


class CheckpointPatch:
    """A new folder OUT with the source's files, in which `write` replaces tensors or rows.

    Layout, sharding and all other files are unchanged. `link` makes hard links of unchanged shards.
    These need no space but share data with the source: do not edit either in place. Pickled and
    adapted (`model+lora`) sources are rewritten as safetensors, in floats. New values of quantised
    tensors are refused (`keep`), written as floats with all others (`floats`), or rounded to the
    stored format (`same`). OUT appears on `commit` or not at all.
    """

    def __init__(
        self,
        source: Checkpoint,
        out: Path,
        *,
        overwrite: bool = False,
        link: bool = False,
        inputs: Sequence[Path] = (),
        quantised: Quantised = "keep",
    ) -> None:
        self.source = source
        self.out = out
        self.rounding = RoundingErrors()
        self._quantised = quantised
        inputs = (source.path, *inputs)
        in_place = not isinstance(source, AdaptedCheckpoint) and all(
            isinstance(file, SafetensorsFile) for file in source.files
        )
        if quantised == "same" and not in_place:
            raise CheckpointError(
                f"{source.label} has an adapter or pickled weights, and cannot be written back as "
                "it is stored",
                hint='merge it with `requantize="same"` first, and use the result',
            )
        if source.quantisation is not None and quantised == "floats":
            in_place = False
        self._in_place = in_place
        self._target: _PatchedCopy | _Rewritten = (
            _PatchedCopy(source, out, overwrite=overwrite, link=link, inputs=inputs)
            if in_place
            else _Rewritten(source, out, overwrite=overwrite, inputs=inputs)
        )

    @property
    def nbytes(self) -> int:
        """Return the size of OUT's tensors."""
        infos = self.source.tensors.values()
        return sum(i.stored_bytes if self._in_place else i.nbytes for i in infos)

    def begin(self, names: Collection[str]) -> None:
        """Start copying in the background; `names` are the tensors that will be replaced."""
        stored: list[str] = []
        for name in names:
            info = self._encoded(name)
            stored += [name] if info is None else [part.name for part in info.parts]
        self._target.begin(stored)

    def _encoded(self, name: str) -> QuantisedInfo | None:
        """Return the quantised format for new values of a tensor; None for floats."""
        info = self.source.tensors.get(name)
        if not self._in_place or not isinstance(info, QuantisedInfo):
            return None
        if self._quantised == "keep":
            raise CheckpointError(
                f"{self.source.label}: {name!r} is stored as {info.stored_as}; new values would be "
                "rounded to that",
                hint="write the model in floats first, with `moemerge merge` and passthrough",
            )
        return info

    def require_writable(self, name: str) -> None:
        """Refuse a tensor whose new values could not be stored."""
        self._encoded(name)

    def poll(self) -> None:
        """Raise an error of the background copy, if any."""
        self._target.poll()

    @property
    def copied(self) -> tuple[float, int]:
        """Return the seconds and bytes of shards copied so far."""
        return self._target.copied

    def write(self, name: str, tensor: Tensor, row: int = 0) -> None:
        """Replace a tensor, or leading-axis rows from `row` on. Thread-safe; once per row."""
        info, encoded = self.source.tensors.get(name), self._encoded(name)
        if info is None:
            self.source.file_of(name)  # raises, with a suggestion
        else:
            info.require_fit(tensor, row)
        if encoded is None:
            self._target.write(name, tensor, row)
            return
        for part in self.rounding.encode(encoded, self.source, tensor, row):
            self._target.write(part.name, part.tensor, part.row)

    def add_bytes(self, filename: str, data: bytes) -> None:
        """Add a small file to the output, replacing the source's of that name."""
        self._target.add_bytes(filename, data)

    def add_file(self, source: Path, name: str | None = None) -> None:
        """Copy a file into the output, replacing the source's of that name."""
        self._target.add_file(source, name)

    def commit(self) -> None:
        self.source.require_unchanged()
        self._target.commit()

    def abort(self) -> None:
        self._target.abort()

    def __enter__(self) -> CheckpointPatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()


def other_files(source: Checkpoint) -> dict[str, Path]:
    """Return all files of a model folder except weights and training states.

    Weights outside the index are stale and are excluded too.
    """
    return companion_files(
        source.path, lambda name: not name.startswith(".") and not is_weights(name)
    )


class _PatchedCopy:
    """Copies shards byte for byte and overwrites tensors in place.

    `begin` copies all shards in the background. Without it, a shard is copied when it is first
    written to, and the others on commit.
    """

    def __init__(
        self, source: Checkpoint, out: Path, *, overwrite: bool, link: bool, inputs: Sequence[Path]
    ) -> None:
        self._source = source
        self._link = link
        self._out = out
        self._copies: dict[str, Future[int]] = {}  # shard name -> descriptor of the copy
        self._copier = ThreadPoolExecutor(1, "moemerge-copy")
        self._stopped = threading.Event()
        self._seconds, self._nbytes = 0.0, 0
        self._lock = threading.Lock()
        self._closed = False
        self._folder = OutputFolder(out, overwrite=overwrite, inputs=inputs)

    def write(self, name: str, tensor: Tensor, row: int) -> None:
        file = self._source.file_of(name)
        assert isinstance(file, SafetensorsFile)  # otherwise everything is rewritten
        data = as_bytes(tensor.detach().cpu().contiguous())
        with writing(self._out), self._lock:
            self._check_open()
            fd = self._submit(file).result()
            offset = file.header.offsets[name] + row * file.tensors[name].row_bytes
            write_at(fd, data, offset)

    def begin(self, names: Collection[str]) -> None:
        touched = [self._source.file_of(name) for name in names]
        files = touched if self._link else self._source.files
        with self._lock:
            self._check_open()
            for file in files:
                self._submit(file)

    def poll(self) -> None:
        with writing(self._out):
            for copy in list(self._copies.values()):
                if copy.done():
                    copy.result()

    @property
    def copied(self) -> tuple[float, int]:
        return self._seconds, self._nbytes

    def _submit(self, file: TensorFile) -> Future[int]:
        name = str(file.path.relative_to(self._source.path))
        if name not in self._copies:
            self._copies[name] = self._copier.submit(self._copy, file.path, self._place(name))
        return self._copies[name]

    def _copy(self, source: Path, target: Path) -> int:
        """Copy one shard; runs in the background."""
        begin = time.perf_counter()
        copy_file(source, target, self._check_running)
        self._nbytes += target.stat().st_size
        self._seconds += time.perf_counter() - begin
        return os.open(target, os.O_RDWR | os.O_CLOEXEC)

    def _check_running(self) -> None:
        if self._stopped.is_set():
            raise CheckpointError(f"the output {self._out} was abandoned")

    def _place(self, name: str) -> Path:
        return place_in(self._folder.path, name, self._out)

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointError(f"the output {self._out} was closed already")

    def add_bytes(self, filename: str, data: bytes) -> None:
        with self._lock:
            self._check_open()
            self._folder.add_bytes(filename, data)

    def add_file(self, source: Path, name: str | None) -> None:
        with self._lock:
            self._check_open()
            self._folder.add_file(source, name)

    def commit(self) -> None:
        try:
            with writing(self._out), self._lock:
                self._check_open()
                self._copy_rest()
                for copy in self._copies.values():
                    copy.result()
            self._release()
            self._folder.commit()
        except BaseException:
            self.abort()
            raise

    def _copy_rest(self) -> None:
        for file in self._source.files:
            if not self._link:
                self._submit(file)
                continue
            name = str(file.path.relative_to(self._source.path))
            if name not in self._copies:
                self._adopt(file.path, self._place(name))
        others = other_files(self._source)
        if os.path.exists(self._source.path / INDEX):
            others[INDEX] = self._source.path / INDEX
        for name, path in others.items():
            target = self._place(name)
            if not os.path.exists(target):
                copy_file(path, target)

    def _adopt(self, source: Path, target: Path) -> None:
        try:
            os.link(os.path.realpath(source), target)
        except OSError as error:
            if error.errno not in {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP}:
                raise
            copy_file(source, target)

    def abort(self) -> None:
        self._release()
        self._folder.abort()

    def _release(self) -> None:
        self._stopped.set()
        self._copier.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            self._closed = True
            for copy in self._copies.values():
                if not copy.cancelled() and copy.exception() is None:
                    os.close(copy.result())
            self._copies.clear()


class _Rewritten(CheckpointWriter):
    """Rewrites every tensor; those not replaced are read from the source on commit."""

    copied = (0.0, 0)

    def __init__(
        self, source: Checkpoint, out: Path, *, overwrite: bool, inputs: Sequence[Path]
    ) -> None:
        self._source = source
        super().__init__(
            out,
            [TensorInfo.of(i.name, i.dtype, i.shape) for i in source.tensors.values()],
            shard_bytes=DEFAULT_SHARD_BYTES,
            overwrite=overwrite,
            inputs=inputs,
        )

    def begin(self, names: Collection[str]) -> None:
        """Do nothing: every tensor is converted, so nothing can be copied early."""

    def poll(self) -> None: ...

    def commit(self) -> None:
        try:
            for name, spans in self.missing().items():
                for start, stop in spans:
                    self._copy_rows(self._source.tensors[name], start, stop)
            # An adapter may change the vocabulary, and quantised tensors become floats.
            if not os.path.exists(self.folder / "config.json"):
                config = json.dumps(self._source.config, indent=2) + "\n"
                self.add_bytes("config.json", config.encode())
            files = {**other_files(self._source), **self._source.companions()}
            files.pop(QUANTISATION_FILE, None)  # OUT has floats
            for name, path in files.items():
                if not os.path.exists(self.folder / name):
                    self.add_file(path, name)
            super().commit()
        except BaseException:
            self.abort()
            raise

    def _copy_rows(self, info: TensorInfo, start: int, stop: int) -> None:
        if not info.shape:
            self.write(info.name, self._source.read(info.name))
            return
        step = max(1, _COPY_BLOCK_BYTES // max(1, info.row_bytes))
        for row in range(start, stop, step):
            block = self._source.read(info.name, (row, min(row + step, stop)))
            self.write(info.name, block, row)
