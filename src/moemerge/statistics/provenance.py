"""The provenance of statistics, and digests that decide whether they belong to a model."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from moemerge.checkpoint import Checkpoint
from moemerge.checkpoint.tensors import as_bytes
from moemerge.errors import TokenizerError
from moemerge.families.architecture import Architecture
from moemerge.families.roles import Unit
from moemerge.runtime.files import VOCABULARIES, read_file
from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


# Elements of a unit that enter a fingerprint. Experts are many, and in a transposed stack each
# element is read by itself.
SAMPLE = 512
EXPERT_SAMPLE = 16


def family_name(architecture: Architecture) -> str:
    """Return the name of a model's family, the same for all its model types."""
    if architecture.family is not None:
        return architecture.family.model_type
    return architecture.model_type or "unknown"


def model_fingerprint(checkpoint: Checkpoint, architecture: Architecture) -> str:
    """Return a digest of a model's weights, the same in every on-disk layout.

    It covers every unit's key, shape and dtype, and a sample of its elements. Experts are included,
    because some fine-tunes change few of them and nothing else.
    """
    units = architecture.units_by_key
    digest = hashlib.sha256()
    for key in sorted(units):
        unit = units[key]
        dtype = checkpoint.tensors[unit.tensor].dtype
        digest.update(f"\0{key}\0torch.{dtype}\0{list(unit.shape)}\0".encode())
        digest.update(as_bytes(_sample(checkpoint, unit)))
    return digest.hexdigest()


def _sample(checkpoint: Checkpoint, unit: Unit) -> Tensor:
    """Return the first elements of a matrix's middle row, or of a vector: (n,)."""
    if unit.expert is not None and checkpoint.has_elements(unit.tensor):
        return _sample_expert(checkpoint, unit)
    slot = unit.slot
    if slot.covers_block and not slot.squeeze and len(unit.shape) > 1 and unit.shape[0] > 0:
        row = (slot.rows[0] if slot.rows else 0) + unit.shape[0] // 2
        value = checkpoint.read(unit.tensor, (row, row + 1))
    else:
        value = _middle(slot.take(checkpoint.read(unit.tensor, slot.rows)))
    count = SAMPLE if unit.expert is None else EXPERT_SAMPLE
    return value.reshape(-1)[:count].contiguous()


def _sample_expert(checkpoint: Checkpoint, unit: Unit) -> Tensor:
    """Return the sample of an expert without reading its whole stack."""
    info = checkpoint.tensors[unit.tensor]
    first, stop = unit.slot.rows or (0, info.rows)
    # A view of a meta tensor shows the position of the elements.
    view = _middle(unit.slot.take(torch.empty((stop - first, *info.shape[1:]), device="meta")))
    start = first * (info.row_bytes // info.dtype.itemsize) + int(view.storage_offset())
    step = view.stride(-1)
    value = torch.empty(min(EXPERT_SAMPLE, view.shape[-1]), dtype=info.dtype.torch)
    if step == 1:
        checkpoint.read_elements(unit.tensor, start, as_bytes(value))
    else:
        for i in range(len(value)):
            checkpoint.read_elements(unit.tensor, start + i * step, as_bytes(value[i : i + 1]))
    return value


def _middle(value: Tensor) -> Tensor:
    return value[value.shape[0] // 2] if value.dim() > 1 and value.shape[0] else value


def tokenizer_fingerprint(folder: Path) -> str | None:
    """Return a digest of a tokenizer's vocabulary; None without a tokenizer.

    For a tokenizer.json it covers the vocabulary and the added tokens, not the formatting.
    """
    whole = folder / "tokenizer.json"
    if os.path.isfile(whole):
        content = read_file(whole, raises=TokenizerError)
        try:
            parsed = json.loads(content)
            model = parsed["model"]
            parts = [model.get("vocab"), model.get("merges"), parsed.get("added_tokens")]
            content = json.dumps(parts, sort_keys=True).encode()
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # unknown format: hash the bytes
        return hashlib.sha256(content).hexdigest()
    for pattern in VOCABULARIES:
        files = sorted(path for path in folder.glob(pattern) if os.path.isfile(path))
        if files:
            return hashlib.sha256(b"".join(map(read_file, files))).hexdigest()
    return None


def data_fingerprint(rows: Iterable[Tensor]) -> str:
    """Return a digest of token rows, each (tokens,), in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(len(row).to_bytes(8, "little"))
        digest.update(as_bytes(row.to(torch.int64).contiguous()))
    return digest.hexdigest()
