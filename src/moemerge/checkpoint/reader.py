"""Read a model folder as a mapping from names to tensors: headers first, tensors on demand."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from moemerge.checkpoint.adapter import open_adapter
from moemerge.checkpoint.folder import (
    TensorFile,
    companion_files,
    config_hint,
    open_folder,
    place_tensors,
)
from moemerge.checkpoint.locate import locate
from moemerge.checkpoint.lora import LoraChanges
from moemerge.checkpoint.quantised.formats import section_of
from moemerge.checkpoint.quantised.recognise import (
    SECTIONS,
    Quantisation,
    recognise,
    without_sections,
)
from moemerge.checkpoint.quantised.tensor import FetchStored, QuantisedInfo
from moemerge.checkpoint.safetensors_file import SafetensorsFile
from moemerge.checkpoint.tensors import RowRange, TensorInfo, format_size
from moemerge.config.models import ModelRef
from moemerge.errors import CheckpointError
from moemerge.registry import did_you_mean
from moemerge.runtime.files import read_object

if TYPE_CHECKING:
    from torch import Tensor


logger = logging.getLogger(__name__)
SAMPLE_BYTES: Final = 1024


@dataclass(frozen=True, eq=False)
class Structure:
    """What config and headers determine. Open models with equal ones share it."""

    number_of: Mapping[str, int]  # of the file of each stored tensor
    total_bytes: int
    tensors: Mapping[str, TensorInfo]
    quantisation: Quantisation | None


_STRUCTURES: WeakValueDictionary[tuple[object, ...], Structure] = WeakValueDictionary()


class Checkpoint(Mapping[str, "Tensor"]):
    """An opened model folder. `tensors` has names, shapes and dtypes in file order.

    Opening reads headers only. `read` returns a new CPU tensor and is thread-safe. Quantised
    tensors read as floats and include their scales; `config` is that of a model in plain floats.
    `quantisation` describes the stored format.
    """

    def __init__(self, path: Path, label: str | None = None) -> None:
        self.path = path
        self.label = label if label is not None else str(path)
        self.config: dict[str, Any] = read_object(path / "config.json", config_hint(path))
        if not any(self.config.get(name) for name in SECTIONS):
            self.config |= section_of(path)
        files, index = open_folder(path)
        self.files = tuple(files.values())
        self._states = {file.path: _state(file.path) for file in self.files}
        try:
            self.structure = self._find_structure(files, index)
        except BaseException:
            Checkpoint.close(self)
            raise
        self.tensors, self.quantisation = self.structure.tensors, self.structure.quantisation
        if self.quantisation is not None:
            self.config = without_sections(self.config)
        if logger.isEnabledFor(logging.INFO):
            count, size = len(self.files), format_size(self.total_bytes)
            logger.info("opened %s: %d tensors in %d files, %s", self.label, len(self), count, size)

    def require_unchanged(self) -> None:
        """Raise if a file was changed after it was opened."""
        for path, state in self._states.items():
            if _state(path) != state:
                raise CheckpointError(
                    f"{path} was changed or replaced while it was read",
                    hint="the data read may be a mixture of two models; repeat this when no other "
                    "process writes to it",
                )

    def _find_structure(
        self, files: Mapping[str, TensorFile], index: Mapping[str, str]
    ) -> Structure:
        headers = [file.header for file in self.files if isinstance(file, SafetensorsFile)]
        key = (json.dumps(self.config), *headers)
        known = _STRUCTURES.get(key) if len(headers) == len(files) else None
        if known is not None:
            return known
        number_of = place_tensors(files, index)
        stored = {name: self.files[number].tensors[name] for name, number in number_of.items()}
        try:
            quantisation = recognise(
                self.config, stored, lambda name: self.files[number_of[name]].read(name).tolist()
            )
        except CheckpointError as error:
            raise CheckpointError(f"{self.label}: {error.message}", hint=error.hint) from error
        tensors: Mapping[str, TensorInfo] = stored
        if quantisation is not None:
            # Each unit replaces its codes; its other parts are hidden.
            unit_of = {unit.codes.name: unit for unit in quantisation.units.values()}
            hidden = quantisation.stored - unit_of.keys()
            seen = (unit_of.get(name, info) for name, info in stored.items() if name not in hidden)
            tensors = {info.name: info for info in seen}
        total_bytes = sum(info.nbytes for info in stored.values())
        structure = Structure(number_of, total_bytes, tensors, quantisation)
        # Headers show neither the values of a tensor in two files, which were compared, nor the
        # shapes that compressed-tensors stores as tensors.
        once = len(stored) == sum(len(file.tensors) for file in self.files)
        if once and (quantisation is None or quantisation.method in ("fp8", "mxfp4")):
            _STRUCTURES[key] = structure
        return structure

    @classmethod
    def open(cls, ref: str | Path | ModelRef) -> Checkpoint:
        """Open a folder or a hub id (`org/name@revision`), with or without an adapter (`+lora`)."""
        model = as_ref(ref)
        folder = locate(model.path, model.revision)
        if model.lora is None:
            return Checkpoint(folder, str(ref))
        adapter = locate(model.lora, model.lora_revision)
        return AdaptedCheckpoint(folder, adapter, str(ref), model.lora_layout)

    def read(
        self,
        name: str,
        rows: RowRange | None = None,
        out: Tensor | None = None,
        codes: FetchStored | None = None,
    ) -> Tensor:
        """Read a tensor, or the rows [start, stop) of its leading axis, into new memory.

        `out`, a contiguous CPU tensor of the result's shape and dtype, avoids the allocation. For a
        quantised tensor it may be on a GPU; `codes` then reads codes to there.
        """
        info = self.tensors.get(name)
        if not isinstance(info, QuantisedInfo):
            return self.stored(name, rows, out)
        try:
            return info.read(self.stored, rows, out, codes)
        except CheckpointError as error:
            raise CheckpointError(f"{self.label}: {error.message}", hint=error.hint) from error

    def stored_info(self, name: str) -> TensorInfo | None:
        """Return the header of a tensor under its stored name, if it exists."""
        return self.file_of(name).tensors[name] if name in self.structure.number_of else None

    def stored(self, name: str, rows: RowRange | None = None, out: Tensor | None = None) -> Tensor:
        """Read a tensor under its stored name, without dequantising it."""
        return self.file_of(name).read(name, rows, out)

    def has_elements(self, name: str) -> bool:
        """Return whether `read_elements` can read the tensor, because it is stored as it reads."""
        quantised = isinstance(self.tensors.get(name), QuantisedInfo)
        return not quantised and isinstance(self.file_of(name), SafetensorsFile)

    def read_elements(self, name: str, start: int, out: memoryview) -> None:
        """Fill the bytes `out` with the tensor's elements from `start` on."""
        file = self.file_of(name)
        assert isinstance(file, SafetensorsFile)
        file.read_elements(name, start, out)

    def prefetch(self, name: str, rows: RowRange | None = None) -> None:
        """Let the system start to read a tensor that is needed soon. Does not wait."""
        info = self.tensors.get(name)
        if isinstance(info, QuantisedInfo):
            name = info.codes.name
        self.file_of(name).prefetch(name, rows)

    def file_of(self, name: str) -> TensorFile:
        """Return the file that holds a tensor."""
        number_of = self.structure.number_of
        if name not in number_of:
            raise CheckpointError(
                f"{self.label} has no tensor {name!r}{did_you_mean(name, number_of)}",
                hint=f"it has {len(number_of)} tensors; `moemerge inspect` lists what it is",
            )
        return self.files[number_of[name]]

    def place_of(self, name: str) -> str:
        """Return the file's name, for messages about a tensor's values."""
        info = self.tensors.get(name)
        return self.file_of(info.codes.name if isinstance(info, QuantisedInfo) else name).path.name

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise KeyError(name)
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def __repr__(self) -> str:
        return f"Checkpoint({self.label!r}, {len(self)} tensors, {self.total_bytes} bytes)"

    __hash__ = object.__hash__
    __eq__ = object.__eq__  # a mapping would compare all tensors

    @property
    def total_bytes(self) -> int:
        """Return the bytes of all tensors on disk."""
        return self.structure.total_bytes

    @property
    def file_sizes(self) -> dict[tuple[int, ...], int]:
        """Return the size of each file with weights by device and inode: hard links are one."""
        return {state[:2]: state[2] for state in self._states.values() if state is not None}

    @property
    def notices(self) -> tuple[str, ...]:
        """Return what the user should know about how the model is read."""
        return ()

    @property
    def folders(self) -> tuple[Path, ...]:
        """Return every folder that is read; none may be written to meanwhile."""
        return (self.path,)

    @property
    def tokenizer_folder(self) -> Path:
        """Return the folder with the tokenizer of the embedding's rows."""
        return self.path

    def companions(self) -> dict[str, Path]:
        """Return the companion files (tokenizer, templates, licence) by name."""
        return companion_files(self.path)

    def fingerprint(self) -> str:
        """Return a cheap digest that identifies the model.

        It covers the config, every tensor's name, dtype and shape, and up to 1 KiB from the middle
        of every tensor. It changes if a tensor is trained, merged or calibrated, but may miss a
        single changed element. It does not cover folder, sharding and companion files.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name in sorted(self.structure.number_of):
            file = self.file_of(name)
            info = file.tensors[name]
            digest.update(f"\0{name}\0torch.{info.dtype}\0{info.shape}\0".encode())
            digest.update(file.sample(name, SAMPLE_BYTES))
        return digest.hexdigest()

    def close(self) -> None:
        """Close the files; a `with` block does it."""
        for file in self.files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AdaptedCheckpoint(Checkpoint):
    """A base checkpoint with one adapter. Adapter tensors that match nothing are refused."""

    def __init__(
        self, path: Path, adapter: Path, label: str | None = None, layout: str | None = None
    ) -> None:
        super().__init__(path, label if label is not None else f"{path}+{adapter}")
        try:
            self.adapter = open_adapter(adapter)
        except BaseException:
            super().close()
            raise
        try:
            self._changes = LoraChanges(self.adapter, path, self.config, self.tensors, layout)
        except BaseException:
            self.close()
            raise
        self._states[self.adapter.file.path] = _state(self.adapter.file.path)
        for name, info in self._changes.infos.items():  # of resized embeddings
            old = self.tensors[name].rows
            if info.rows != old and self.config.get("vocab_size") == old:
                self.config = {**self.config, "vocab_size": info.rows}
        self.tensors = {**self.tensors, **self._changes.infos}

    @property
    def notices(self) -> tuple[str, ...]:
        return self._changes.notices

    @property
    def changed(self) -> tuple[str, ...]:
        """Return the names of the tensors that the adapter changes."""
        return tuple(name for name in self.tensors if self._changes.touches(name))

    def has_elements(self, name: str) -> bool:
        return not self._changes.touches(name) and super().has_elements(name)

    def read(
        self,
        name: str,
        rows: RowRange | None = None,
        out: Tensor | None = None,
        codes: FetchStored | None = None,
    ) -> Tensor:
        read = super().read
        if not self._changes.touches(name):
            return read(name, rows, out, codes)
        block = self._changes.read(name, rows, lambda: read(name, rows))
        return block if out is None else out.copy_(block)

    def place_of(self, name: str) -> str:
        place = super().place_of(name)
        return f"{place} or {self.adapter.file.path}" if self._changes.touches(name) else place

    @property
    def folders(self) -> tuple[Path, ...]:
        return (self.path, self.adapter.path)

    @property
    def tokenizer_folder(self) -> Path:
        """Return the adapter's folder if it has a tokenizer, which may have added tokens."""
        own = os.path.isfile(self.adapter.path / "tokenizer.json")
        return self.adapter.path if own else self.path

    def companions(self) -> dict[str, Path]:
        """Return the base's files; those saved with the adapter take precedence."""
        return dict(sorted({**super().companions(), **companion_files(self.adapter.path)}.items()))

    def fingerprint(self) -> str:
        """Return a digest of the base's fingerprint and the adapter's settings and tensors."""
        digest = hashlib.sha256(super().fingerprint().encode())
        digest.update(json.dumps(self.adapter.config, sort_keys=True).encode())
        for name in sorted(self.adapter.file.tensors):
            digest.update(name.encode() + self.adapter.file.sample(name, SAMPLE_BYTES))
        return digest.hexdigest()

    def close(self) -> None:
        super().close()
        self.adapter.file.close()


def as_ref(ref: str | Path | ModelRef) -> ModelRef:
    """Return the model reference. The path of an existing folder may contain `@` and `+`."""
    if isinstance(ref, ModelRef):
        return ref
    if isinstance(ref, Path) or os.path.isdir(os.path.expanduser(ref)):
        return ModelRef(path=str(ref))
    return ModelRef.parse(ref)


def _state(path: Path) -> tuple[int, ...] | None:
    """Return a key that changes with a file's content; None if the file is gone."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns


class OverlaidCheckpoint(Checkpoint):
    """A checkpoint that takes some tensors from another one, or from memory.

    It shares the files of its base, so it has nothing to close.
    """

    def __init__(self, base: Checkpoint, overlay: Mapping[str, Callable[[], Tensor]]) -> None:
        self.path = base.path
        self.label = base.label
        self.config = base.config
        self.files, self.structure = base.files, base.structure
        self.tensors, self.quantisation = base.tensors, base.quantisation
        self._base = base
        self._overlay = overlay

    def read(
        self,
        name: str,
        rows: RowRange | None = None,
        out: Tensor | None = None,
        codes: FetchStored | None = None,
    ) -> Tensor:
        if name not in self._overlay:
            return self._base.read(name, rows, out, codes)
        info = self.tensors[name]
        block = self._overlay[name]().to(info.dtype.torch).reshape(info.shape)
        if rows is not None:
            block = block[rows[0] : rows[1]]
        return block.clone() if out is None else out.copy_(block)

    def close(self) -> None: ...
