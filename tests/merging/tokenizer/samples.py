"""Tokenizer files and numbered embeddings that the tests of this room are made of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from moemerge.config.models import ModelRef
from moemerge.config.schema import TokenizerSettings
from moemerge.merging.tokenizer.plan import TokenizerPlan, plan_tokenizer
from moemerge.merging.tokenizer.vocab import Vocabulary, read_vocabulary


def entry(content: str, index: int = 0, **flags: bool) -> dict[str, Any]:
    off = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": index, "content": content, **off, **flags}


def tokenizer_json(model: dict[str, Any], added: Sequence[dict[str, Any]]) -> dict[str, Any]:
    parts = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    return {
        "version": "1.0",
        **dict.fromkeys(parts),
        "pre_tokenizer": {"type": "Whitespace"},
        "added_tokens": list(added),
        "model": model,
    }


def bpe(vocab: Sequence[str], merges: Sequence[Sequence[str]] = ()) -> dict[str, Any]:
    return {
        "type": "BPE",
        "vocab": {token: index for index, token in enumerate(vocab)},
        "merges": [list(pair) for pair in merges],
    }


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def vocabularies(models: Sequence[ModelRef]) -> dict[ModelRef, Vocabulary]:
    return {m: read_vocabulary(Path(m.path), str(m)) for m in models}


def numbered(model: int, rows: int, width: int = 2) -> torch.Tensor:
    """Row r of model k holds 100 k + r: a row tells where it comes from."""
    return (100 * model + torch.arange(rows, dtype=torch.float32))[:, None].repeat(1, width)


def plan(
    models: tuple[ModelRef, ...], rows: tuple[int, ...], base: ModelRef | None, **settings: Any
) -> TokenizerPlan:
    """Plan the output's tokenizer for models with so many rows in their embeddings."""
    return plan_tokenizer(
        TokenizerSettings.model_validate(settings),
        vocabularies(models),
        base=base,
        order=models,
        embedding_rows=dict(zip(models, rows, strict=True)),
    )
