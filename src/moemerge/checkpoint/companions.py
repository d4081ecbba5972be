"""Which files of a model folder travel with it: tokenizer, templates, licence, custom code.

`config.json` is not among them: whoever writes an output decides what its config says.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

from moemerge.errors import CheckpointError

CARRIED: Final = (
    "tokenizer*.json",
    "tokenizer*.model",
    "tokenization*.py",
    "vocab*.json",
    "vocab*.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "*.spm",
    "spiece.*",
    "bpe.codes",
    "tekken.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "image_processor_config.json",
    "feature_extractor_config.json",
    "*.py",  # code named by the config's auto_map; carried, never run
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
    """Whether a file holds or indexes weights (or training state) of any kind."""
    return any(fnmatch(name.lower(), pattern) for pattern in WEIGHTS)


def is_companion(name: str) -> bool:
    return not is_weights(name) and any(fnmatch(name.lower(), pattern) for pattern in CARRIED)


def companion_files(folder: Path) -> dict[str, Path]:
    """Name inside the folder -> file, sorted."""
    files = {p.name: p for p in copied_files(folder, folder, is_companion)}
    for name in CARRIED_FOLDERS:
        files |= folder_files(folder, name)
    return dict(sorted(files.items()))


def copied_files(inner: Path, folder: Path, wanted: Callable[[str], bool]) -> list[Path]:
    """The wanted files directly in `inner`, which is the model's `folder` or lies in it.

    A link that leads out of the model is refused: what it shows would be copied into an output that
    may be published. The hub's cache is made of links into its own `blobs`.
    """
    root = Path(os.path.realpath(folder))
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append(root.parent.parent / "blobs")
    files = [path for path in inner.iterdir() if path.is_file() and wanted(path.name)]
    for path in files:
        real = Path(os.path.realpath(path))
        if not any(real.is_relative_to(home) for home in homes):
            raise CheckpointError(
                f"{path} is a link to {real}, outside the model's folder",
                hint="files of a model are copied into the output: replace the link by the file "
                "itself if it is meant, else remove it",
            )
    return files


def folder_files(folder: Path, name: str) -> dict[str, Path]:
    """The plain files directly inside a subfolder, by their name relative to `folder`."""
    inner = folder / name
    if not inner.is_dir():
        return {}
    return {f"{name}/{p.name}": p for p in copied_files(inner, folder, lambda _: True)}
