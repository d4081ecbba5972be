"""The weight files of a model folder: which there are, and which of them holds which tensor."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final, Protocol

from moemerge.checkpoint.pickled import PickledFile
from moemerge.checkpoint.safetensors_file import SafetensorsFile
from moemerge.checkpoint.tensors import TensorInfo
from moemerge.errors import CheckpointError
from moemerge.registry import did_you_mean
from moemerge.runtime.files import read_object

if TYPE_CHECKING:
    from torch import Tensor


SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PICKLED_SINGLE: Final = "pytorch_model.bin"
PICKLED_INDEX: Final = "pytorch_model.bin.index.json"
ADAPTER_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
_SHARD: Final = re.compile(r"(.*)-(\d+)-of-(\d+)\.(safetensors|bin)")


class TensorFile(Protocol):
    """One file of tensors; reading is safe from any thread."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read(
        self, name: str, rows: tuple[int, int] | None = None, out: Tensor | None = None
    ) -> Tensor: ...

    def prefetch(self, name: str, rows: tuple[int, int] | None = None) -> None: ...

    def sample(self, name: str, limit: int) -> bytes: ...

    def close(self) -> None: ...


def config_hint(folder: Path) -> str:
    """What to do about a folder that is no model's."""
    if (folder / "adapter_config.json").exists():
        return f"{folder} is a PEFT adapter; name it with its model: BASE+{folder}"
    return "a model folder has a config.json; point at the folder that does"


def open_file(path: Path) -> TensorFile:
    return SafetensorsFile(path) if path.suffix == ".safetensors" else PickledFile(path)


def open_folder(folder: Path) -> tuple[tuple[TensorFile, ...], dict[str, TensorFile]]:
    """All weight files of a folder, and which of them holds which tensor."""
    index = _index_path(folder)
    weight_map = {} if index is None else _read_index(index)
    names = sorted(set(weight_map.values())) if index is not None else _weight_files(folder)
    files: dict[str, TensorFile] = {}
    try:
        for name in names:
            files[name] = open_file(folder / name)
        file_of = _union(files, weight_map, index)
    except BaseException:
        for file in files.values():
            file.close()
        raise
    return tuple(files.values()), file_of


def _index_path(folder: Path) -> Path | None:
    for index, single in ((INDEX, SINGLE), (PICKLED_INDEX, PICKLED_SINGLE)):
        if (folder / index).exists():
            if (folder / single).exists() and single not in _read_index(folder / index).values():
                raise CheckpointError(
                    f"{folder} holds {single} and also {index}, which does not name it; "
                    "it is unclear which of the two is the model",
                    hint="remove (or move away) the one that is out of date",
                )
            return folder / index
        if (folder / single).exists():
            return None
        if index == INDEX and any(_loose(folder, "*.safetensors")):
            return None
    return None


def _loose(folder: Path, pattern: str) -> list[str]:
    names = (p.name for p in folder.glob(pattern) if p.is_file())
    return sorted(name for name in names if name not in ADAPTER_WEIGHTS)


def _weight_files(folder: Path) -> list[str]:
    """The files of a folder without an index: `model.safetensors`, or all there are."""
    for single, pattern in ((SINGLE, "*.safetensors"), (PICKLED_SINGLE, "pytorch_model*.bin")):
        if (folder / single).exists():
            return [single]
        names = _loose(folder, pattern)
        if names:
            _check_numbering(folder, names)
            return names
    raise CheckpointError(
        f"{folder} has no weights: no {SINGLE}, {INDEX}, other *.safetensors or {PICKLED_SINGLE}",
        hint=config_hint(folder)
        if (folder / "adapter_config.json").exists()
        else "point at a model folder whose download is complete",
    )


def _check_numbering(folder: Path, names: Sequence[str]) -> None:
    """Without an index only the numbers in the names tell that a shard is missing."""
    for match in filter(None, (_SHARD.fullmatch(name) for name in names)):
        stem, number, count, suffix = match.groups()
        for i in range(1, int(count) + 1):
            wanted = f"{stem}-{i:0{len(number)}d}-of-{count}.{suffix}"
            if wanted not in names:
                raise CheckpointError(
                    f"{folder} has {match[0]} but not {wanted}", hint="fetch the missing file"
                )


def _read_index(path: Path) -> dict[str, str]:
    hint = "fetch the index again, or remove it if all weights are in one file"
    weight_map = read_object(path, hint).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path} has no weight_map that maps tensor names to files", hint=hint
        )
    good: set[str] = set()  # thousands of tensors, few files
    for name, file in weight_map.items():
        if isinstance(file, str) and file in good:
            continue
        if not isinstance(file, str) or not is_inside(file):
            raise CheckpointError(
                f"{path}: tensor {name!r} is said to lie in {file!r}, outside the model folder",
                hint="an index may only name files of its own folder; do not trust this model",
            )
        if not file.endswith((".safetensors", ".bin")):
            raise CheckpointError(
                f"{path}: tensor {name!r} is said to lie in {file!r}, "
                "expected a .safetensors or .bin file",
                hint=hint,
            )
        good.add(file)
    return weight_map


def is_inside(name: str) -> bool:
    """Whether a file name stays in its folder, judged by the name: the hub's cache is made of
    symlinks that leave it for good reason."""
    path = PurePosixPath(name)
    bad = path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name
    return not bad and bool(path.parts)


def place_in(folder: Path, name: str, out: Path) -> Path:
    """Where a file of the output `out` goes, whose files are collected in `folder`."""
    if not is_inside(name):
        raise CheckpointError(f"the file name {name!r} would leave the output {out}")
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _union(
    files: Mapping[str, TensorFile], weight_map: Mapping[str, str], index: Path | None
) -> dict[str, TensorFile]:
    """Which file holds which tensor. The index decides where it speaks; tensors that it forgot
    are read as well, since a tensor must not get lost silently."""
    for name, place in weight_map.items():
        if name not in files[place].tensors:
            raise CheckpointError(
                f"{index} says that {place} holds {name!r}, but it does not"
                f"{did_you_mean(name, files[place].tensors)}",
                hint="index and shards are of different models or versions; fetch both again",
            )
    file_of: dict[str, TensorFile] = {}
    for file_name, file in files.items():
        for name in file.tensors:
            if weight_map.get(name, file_name) != file_name:
                continue
            if name in file_of:
                raise CheckpointError(
                    f"tensor {name!r} is in {file_of[name].path} and in {file.path}",
                    hint="the folder mixes two models; keep the files of one, or add an index",
                )
            file_of[name] = file
    return file_of
