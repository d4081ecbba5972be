"""Tiny merges to calibrate: fine-tunes of one checkpoint, their average, and text for each."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import moemerge
import zoo
from moemerge.diagnosis.results import Diagnosis
from moemerge.repairs.harc_report import CalibrationReport
from moemerge.runtime.progress import Silent

WORDS = zoo._WORDS.split()
NAMES = ("math", "code", "chat")


@dataclass(frozen=True)
class Case:
    merged: Path
    sources: dict[str, Path]
    data: dict[str, Path]

    def calibrate(self, out: Path, **options: Any) -> CalibrationReport:
        options = {"sources": self.sources, "data": self.data, **options}
        return moemerge.calibrate(self.merged, out, **options)

    def diagnose(self, **options: Any) -> Diagnosis:
        options = {"sources": self.sources, "data": self.data, **options}
        return moemerge.diagnose(self.merged, **options)

    def rows(self) -> dict[str, list[Tensor]]:
        """Token ids of every row, by domain."""
        return {name: token_rows(self.merged, path) for name, path in self.data.items()}

    @property
    def flags(self) -> list[str]:
        """Sources and data as flags of a command."""
        sources = [f"--source={name}={path}" for name, path in self.sources.items()]
        return sources + [f"--data={name}={path}" for name, path in self.data.items()]


class Interrupting(Silent):
    """Ctrl-C at the first note with these words."""

    def __init__(self, words: str) -> None:
        self._words = words

    def note(self, message: str) -> None:
        if self._words in message:
            raise KeyboardInterrupt


def make_case(
    base: Path, folder: Path, *, sources: int = 2, scale: float = 0.3, rows: int = 14
) -> Case:
    """`sources` fine-tunes of `base`, merged by averaging, with a tokenizer and text."""
    names = NAMES[:sources]
    tuned = {
        name: zoo.perturb(base, folder / name, seed=10 + at, scale=scale)
        for at, name in enumerate(names)
    }
    merged = average(list(tuned.values()), folder / "merged")
    zoo.tiny_tokenizer(merged)
    data = {
        name: write_text(folder / f"{name}.jsonl", seed=at, rows=rows)
        for at, name in enumerate(names)
    }
    return Case(merged, tuned, data)


def average(folders: list[Path], out: Path) -> Path:
    """The plain mean of checkpoints that are stored alike; integers as in the first."""
    shutil.copytree(folders[0], out, ignore=shutil.ignore_patterns("*.safetensors"))
    for shard in sorted(folders[0].glob("*.safetensors")):
        parts = [load_file(folder / shard.name) for folder in folders]
        mean = {
            name: torch.stack([part[name].float() for part in parts]).mean(0).to(value.dtype)
            if value.is_floating_point()
            else value
            for name, value in parts[0].items()
        }
        save_file(mean, out / shard.name, metadata={"format": "pt"})
    return out


def write_text(path: Path, *, seed: int, rows: int = 14) -> Path:
    """Rows of unequal length; each domain leans to its own half of the words."""
    chance = random.Random(seed)
    half = WORDS[:40] if seed % 2 else WORDS[20:]
    texts = (" ".join(chance.choices(half, k=chance.randint(6, 24))) for _ in range(rows))
    return zoo.write_rows(path, ({"text": text} for text in texts))


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def token_rows(model: Path, path: Path) -> list[Tensor]:
    """Token ids of every row of a file, by plain transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    return [torch.tensor(tokenizer(text)["input_ids"]) for text in texts(path)]


def changed_tensors(before: Path, after: Path) -> set[str]:
    """Names whose bytes differ; both folders must hold the same tensors."""
    old, new = zoo.tensors(before), zoo.tensors(after)
    assert old.keys() == new.keys()
    assert all((old[n].dtype, old[n].shape) == (new[n].dtype, new[n].shape) for n in old)
    return {name for name in old if not _same_bytes(old[name], new[name])}


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))}


def assert_as_diagnosed(case: Case, figures: dict[str, Any], out: Path, **options: Any) -> None:
    """A repair's figures on held-out rows are those of `diagnose`."""
    diagnosis = case.diagnose(against=[out], **options)
    for name in case.sources:
        before, after = diagnosis.total(name), diagnosis.total(name, str(out))
        assert figures["tokens"][name] == before.tokens
        assert figures["mismatch_before"][name] == pytest.approx(before.mismatch)
        assert figures["mismatch_after"][name] == pytest.approx(after.mismatch)
        assert figures["loss_after"][name] == pytest.approx(after.loss)
    assert figures["mismatch_before"] != figures["mismatch_after"]


def leftovers(out: Path) -> list[str]:
    """Hidden files and folders beside an output."""
    return [path.name for path in out.parent.iterdir() if path.name.startswith(".")]


def with_a_mean(base: Path, out: Path, *, mean: float, sharpness: float) -> Path:
    """A copy whose embeddings share a mean (of so many deviations, two channels twenty times that)
    and whose routers are this much surer."""
    shutil.copytree(base, out)
    rng = torch.Generator().manual_seed(3)
    for shard in out.glob("*.safetensors"):
        tensors = load_file(shard)
        for name, value in tensors.items():
            if name.endswith("embed_tokens.weight"):
                shift = torch.randn(value.shape[1], generator=rng) * mean * value.float().std()
                shift[:2] *= 20
                tensors[name] = (value.float() + shift).to(value.dtype)
            elif name.endswith("mlp.gate.weight"):
                tensors[name] = value * sharpness
        save_file(tensors, shard, metadata={"format": "pt"})
    return out
