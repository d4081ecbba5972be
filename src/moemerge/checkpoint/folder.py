"""The files of a model folder: weights, and companions such as tokenizer, licence and custom code.

`config.json` is not a companion: the writer of an output decides its content.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Final

from moemerge.checkpoint.pickled import PickledFile
from moemerge.checkpoint.safetensors_file import SafetensorsFile
from moemerge.errors import CheckpointError
from moemerge.registry import did_you_mean
from moemerge.runtime.files import read_object

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
PICKLED_SINGLE: Final = "pytorch_model.bin"
PICKLED_INDEX: Final = "pytorch_model.bin.index.json"
ADAPTER_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
NO_MODEL: Final = "a model folder has a config.json; point at the folder that does"
_SHARD: Final = re.compile(r"(.*)-(\d+)-of-(\d+)\.(safetensors|bin)")


TensorFile = SafetensorsFile | PickledFile  # reading is thread-safe


def config_hint(folder: Path) -> str:
    """Return the hint for a folder without a model."""
    if os.path.exists(folder / "adapter_config.json"):
        return f"{folder} is a PEFT adapter; name it with its model: BASE+{folder}"
    gguf = next((path.name for path in sorted(folder.glob("*.gguf"))), None)
    if gguf is not None:
        return (
            f"GGUF files are not read: use the unquantised original, or load {gguf} with "
            f"transformers (`from_pretrained(..., gguf_file={gguf!r})`) and `save_pretrained`"
        )
    return NO_MODEL


def open_file(path: Path) -> TensorFile:
    return SafetensorsFile(path) if path.suffix == ".safetensors" else PickledFile(path)


def open_folder(folder: Path) -> tuple[dict[str, TensorFile], Mapping[str, str]]:
    """Open all weight files of a folder. Return them, and the checked index, empty if none."""
    path = _index_path(folder)
    index = {} if path is None else _read_index(path)
    files: dict[str, TensorFile] = {}
    try:
        for name in sorted(set(index.values())) or _weight_files(folder):
            files[name] = open_file(folder / name)
        for name, place in index.items():
            if name not in files[place].tensors:
                raise CheckpointError(
                    f"{path} places {name!r} in {place}, which does not hold it"
                    f"{did_you_mean(name, files[place].tensors)}",
                    hint="index and shards are of different models or versions; fetch both again",
                )
    except BaseException:
        for file in files.values():
            file.close()
        raise
    return files, index


def _index_path(folder: Path) -> Path | None:
    for index, single in ((INDEX, SINGLE), (PICKLED_INDEX, PICKLED_SINGLE)):
        if os.path.exists(folder / index):
            both = os.path.exists(folder / single)
            if both and single not in _read_index(folder / index).values():
                raise CheckpointError(
                    f"{folder} holds {single} and also {index}, which does not name it; "
                    "it is unclear which of the two is the model",
                    hint="remove (or move away) the one that is out of date",
                )
            return folder / index
        if os.path.exists(folder / single):
            return None
        if index == INDEX and any(_loose(folder, "*.safetensors")):
            return None
    return None


def _loose(folder: Path, pattern: str) -> list[str]:
    names = (p.name for p in folder.glob(pattern) if os.path.isfile(p))
    return sorted(name for name in names if name not in ADAPTER_WEIGHTS)


def _weight_files(folder: Path) -> list[str]:
    """Return the weight files of a folder without an index: `model.safetensors`, or all."""
    for single, pattern in ((SINGLE, "*.safetensors"), (PICKLED_SINGLE, "pytorch_model*.bin")):
        if os.path.exists(folder / single):
            return [single]
        names = _loose(folder, pattern)
        if names:
            _check_numbering(folder, names)
            return names
    hint = config_hint(folder)
    raise CheckpointError(
        f"{folder} has no weights: no {SINGLE}, {INDEX}, other *.safetensors or {PICKLED_SINGLE}",
        hint=hint if hint != NO_MODEL else "point at a model folder whose download is complete",
    )


def _check_numbering(folder: Path, names: Sequence[str]) -> None:
    """Refuse missing shards, which without an index only the numbers in file names reveal."""
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
                f"{path} places tensor {name!r} in {file!r}, outside the model folder",
                hint="an index may only name files of its own folder; do not trust this model",
            )
        if not file.endswith((".safetensors", ".bin")):
            raise CheckpointError(
                f"{path} places tensor {name!r} in {file!r}, expected a .safetensors or .bin file",
                hint=hint,
            )
        good.add(file)
    return weight_map


def is_inside(name: str) -> bool:
    """Return whether a file name stays in its folder. Symlinks of the hub's cache may leave it."""
    path = PurePosixPath(name)
    bad = path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name
    return not bad and bool(path.parts)


def place_in(folder: Path, name: str, out: Path) -> Path:
    """Return the path in `folder` of a file of the output `out`, and create its parent."""
    if not is_inside(name):
        raise CheckpointError(f"the file name {name!r} would leave the output {out}")
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def place_tensors(files: Mapping[str, TensorFile], index: Mapping[str, str]) -> dict[str, int]:
    """Return the position of each tensor's file. The index decides; tensors missing in it are
    added, so that none is lost silently.
    """
    number_of: dict[str, int] = {}
    for number, (file_name, file) in enumerate(files.items()):
        for name in file.tensors:
            place = index.get(name, file_name)
            if place != file_name:
                _require_equal(name, files[place], file)
                continue
            if name in number_of:
                first = list(files.values())[number_of[name]]
                raise CheckpointError(
                    f"tensor {name!r} is in {first.path} and in {file.path}",
                    hint="the folder mixes two models; keep the files of one, or add an index",
                )
            number_of[name] = number
    return number_of


def _require_equal(name: str, first: TensorFile, second: TensorFile) -> None:
    """Refuse a tensor that two files store with different values."""
    infos = first.tensors[name], second.tensors[name]
    same = infos[0].dtype == infos[1].dtype and infos[0].shape == infos[1].shape
    if not same or first.sample(name, infos[0].nbytes) != second.sample(name, infos[1].nbytes):
        raise CheckpointError(
            f"tensor {name!r} is in {first.path} and, with other values, in {second.path}",
            hint="the shards are of different models or versions; fetch all of them again",
        )


# --- companions -----------------------------------------------------------------------------------

TOKENIZER_FILES: Final = (
    "tokenizer*.json",
    "tokenizer*.model",
    "tokenization*.py",
    "vocab*.json",
    "vocab*.txt",
    "merges.txt",
    "*.tiktoken",
    "*.spm",
    "spiece.*",
    "sentencepiece*.model",
    "bpe.codes",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*",
)
CARRIED: Final = (
    *TOKENIZER_FILES,
    "*.model",
    "generation_config.json",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "image_processor_config.json",
    "feature_extractor_config.json",
    "*.py",  # code named by the config's auto_map; copied, never run
    "license*",
    "licence*",
    "copying*",
    "notice*",
    "use_policy*",
)
CARRIED_FOLDERS: Final = ("additional_chat_templates",)
WEIGHTS: Final = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.ggml",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.onnx_data",
)


def is_weights(name: str) -> bool:
    """Return whether a file holds or indexes weights (or training state) of any format."""
    return any(fnmatch(name.lower(), pattern) for pattern in WEIGHTS)


def is_companion(name: str) -> bool:
    return not is_weights(name) and any(fnmatch(name.lower(), pattern) for pattern in CARRIED)


def companion_files(folder: Path, wanted: Callable[[str], bool] = is_companion) -> dict[str, Path]:
    """Return the wanted files by their name inside the folder, sorted."""
    files = {path.name: path for path in _copied_files(folder, folder, wanted)}
    for name in CARRIED_FOLDERS:
        if os.path.isdir(folder / name):
            inner = _copied_files(folder / name, folder, lambda _: True)
            files |= {f"{name}/{path.name}": path for path in inner}
    return dict(sorted(files.items()))


def _copied_files(inner: Path, folder: Path, wanted: Callable[[str], bool]) -> list[Path]:
    """Return the wanted files directly in `inner`, the model's `folder` or a subfolder.

    A link that leaves the model is refused, because its target would be copied into an output that
    may be published. Links of the hub's cache into its `blobs` are allowed.
    """
    root = Path(os.path.realpath(folder))
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append(root.parent.parent / "blobs")
    files = [path for path in inner.iterdir() if os.path.isfile(path) and wanted(path.name)]
    for path in files:
        real = Path(os.path.realpath(path))
        if not any(real.is_relative_to(home) for home in homes):
            raise CheckpointError(
                f"{path} is a link to {real}, outside the model's folder",
                hint="files of a model are copied into the output: replace the link by the file "
                "itself if it is meant, else remove it",
            )
    return files
