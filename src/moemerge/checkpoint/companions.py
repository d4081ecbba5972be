"""Which files of a model folder travel with it: tokenizer, templates, licence, custom code.

`config.json` is not among them: whoever writes an output decides what its config says.
"""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Final

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
    """Name inside the folder -> file, sorted. Symlinks (the hub's cache) are followed."""
    found = {p.name: p for p in folder.iterdir() if p.is_file() and is_companion(p.name)}
    for name in CARRIED_FOLDERS:
        found |= folder_files(folder, name)
    return dict(sorted(found.items()))


def folder_files(folder: Path, name: str) -> dict[str, Path]:
    """The plain files directly inside a subfolder, by their name relative to `folder`."""
    inner = folder / name
    if not inner.is_dir():
        return {}
    return {f"{name}/{p.name}": p for p in inner.iterdir() if p.is_file()}
