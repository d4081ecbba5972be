"""A trained set on disk: base, specialists, their text, and what they were made with."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moemerge.checkpoint import CheckpointWriter, TensorInfo
from moemerge.errors import CheckpointError
from moemerge.runtime.dtypes import dtype_name
from moemerge.testbed.network.layout import EOS, Shape, character_tokenizer, config_of, to_tensors
from moemerge.testbed.tasks import problems
from moemerge.text.rows import write_rows

MANIFEST = "testbed.json"
BUNDLE = "bundle"  # the set that comes with the package
BASE = "base"
DATA = "data"
CALIBRATION_ROWS = 1000  # of each domain
_CLASSES = {"olmoe": "OlmoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
_ONE_SHARD = 2**62


@dataclass(frozen=True)
class TrainedSet:
    """Folders of a base and its specialists, and each domain's calibration text by name."""

    folder: Path
    base: Path
    models: dict[str, Path]
    data: dict[str, Path]
    manifest: dict[str, Any]


def open_set(folder: str | Path) -> TrainedSet:
    """A set that `train` wrote."""
    folder = Path(folder)
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        domains = list(manifest["domains"])
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{folder} is no trained set: {MANIFEST} cannot be read ({error})",
            hint="make one with `moemerge testbed train`",
        ) from error
    trained = TrainedSet(
        folder=folder,
        base=folder / BASE,
        models={domain: folder / domain for domain in domains},
        data={domain: folder / DATA / f"{domain}.jsonl" for domain in domains},
        manifest=manifest,
    )
    for path in (trained.base, *trained.models.values(), *trained.data.values()):
        if not path.exists():
            raise CheckpointError(f"the trained set {folder} is incomplete: {path} is missing")
    return trained


def bundled_set() -> TrainedSet:
    """A base and its specialists for math, code and chat, as `moemerge testbed train` made them."""
    folder = resources.files("moemerge.testbed").joinpath(BUNDLE)
    if not isinstance(folder, Path) or not folder.is_dir():
        raise CheckpointError(
            f"the specialists that come with moemerge are not at {folder}",
            hint="install the package anew, or train some: moemerge testbed train --preset demo "
            "--regime soft --arch olmoe --seed 0 OUT, then moemerge demo --set OUT",
        )
    return open_set(folder)


def write_model(folder: Path, flat: Tensor, shape: Shape, dtype: torch.dtype) -> None:
    """A checkpoint with its tokenizer, as transformers reads it."""
    tensors = {
        name: tensor.to(dtype).contiguous()
        for name, tensor in to_tensors(flat.detach().cpu(), shape).items()
    }
    infos = [TensorInfo.of(name, t.dtype, t.shape) for name, t in tensors.items()]
    config = config_of(shape)
    config.architectures = [_CLASSES[shape.arch]]
    config.dtype = dtype_name(dtype)
    with CheckpointWriter(folder, infos, shard_bytes=_ONE_SHARD, overwrite=False) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
        writer.add_bytes("config.json", config.to_json_string(use_diff=False).encode())
        with tempfile.TemporaryDirectory() as made:
            character_tokenizer().save_pretrained(made)
            for file in sorted(Path(made).iterdir()):
                writer.add_file(file)
        writer.commit()


def write_data(folder: Path, domains: tuple[str, ...], seed: int) -> None:
    """Each domain's rows to calibrate with: training problems, exactly as they were trained on."""
    (folder / DATA).mkdir()
    for domain in domains:
        rows = problems(domain, split="train", count=CALIBRATION_ROWS, seed=seed)
        texts = ({"text": p.prompt + p.answer + EOS} for p in rows)
        write_rows(folder / DATA / f"{domain}.jsonl", texts)


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
