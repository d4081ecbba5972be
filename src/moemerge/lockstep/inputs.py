"""What models and texts that are run side by side must have in common, checked beforehand."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from moemerge.architectures.opened import OpenModel
from moemerge.errors import ArchitectureError, TokenizerError, UsageError
from moemerge.features.batches import DEFAULT_BATCH_TOKENS, gpu_batch_tokens
from moemerge.features.loading import holds_scores
from moemerge.features.text import Domain, TextOptions, check_file, load_domains, load_tokenizer
from moemerge.registry import did_you_mean
from moemerge.runtime.devices import gpu_memory, parse_dtype

# A CPU gains nothing from long batches, and their temporaries are the largest thing it holds.
CPU_BATCH_TOKENS = 2048
# Config keys of attention that picks its keys by an indexer.
INDEXERS = ("index_topk", "indexer_budget")


def check_names(sources: Mapping[str, object], data: Mapping[str, object]) -> None:
    """A source and its text are paired by name; each needs the other."""
    if not sources:
        raise UsageError(
            "no source given", hint="name each model that was merged: --source NAME=MODEL"
        )
    problems = [
        f"data {name!r} has no source of that name{did_you_mean(name, sources)}"
        for name in data
        if name not in sources
    ]
    problems += [
        f"source {name!r} has no data{did_you_mean(name, [n for n in data if n not in sources])}"
        for name in sources
        if name not in data
    ]
    if problems:
        raise UsageError(
            "; ".join(problems), hint="every source needs its text: --source A=MODEL --data A=FILE"
        )


def check_files(data: Mapping[str, Sequence[str | Path]]) -> None:
    """Every file exists and is of a kind that can be read."""
    for name, files in data.items():
        for file in map(Path, files):
            check_file(file, f"data {name!r}: ")


class TextSettings(Protocol):
    """What settings of every job that reads text by domains have in common."""

    @property
    def max_length(self) -> int: ...
    @property
    def max_tokens(self) -> int | None: ...
    @property
    def limit(self) -> int | None: ...
    @property
    def holdout(self) -> float: ...
    @property
    def seed(self) -> int: ...


def read_domains(
    model: OpenModel,
    sources: Collection[str],
    data: Mapping[str, Sequence[str | Path]],
    settings: TextSettings,
) -> tuple[tuple[Domain, ...], Any]:
    """Each source's text through the model's tokenizer, and the tokenizer."""
    tokenizer = load_tokenizer(model.checkpoint.tokenizer_folder)
    options = TextOptions(
        max_length=settings.max_length,
        max_tokens=settings.max_tokens,
        limit=settings.limit,
        holdout=settings.holdout,
        seed=settings.seed,
    )
    # In the sources' order, so that the order of --data does not matter.
    files = {name: list(data[name]) for name in sources}
    return load_domains(files, tokenizer, options), tokenizer


def forward_dtype(name: str, model: OpenModel) -> torch.dtype:
    """`auto` is the dtype of most of the checkpoint's bytes: what the model runs in elsewhere."""
    if name != "auto":
        return parse_dtype(name)
    bytes_of: dict[torch.dtype, int] = {}
    for info in model.checkpoint.tensors.values():
        if info.dtype.is_floating_point:
            bytes_of[info.dtype] = bytes_of.get(info.dtype, 0) + info.nbytes
    return max(bytes_of, key=bytes_of.__getitem__, default=torch.float32)


def batch_tokens(model: OpenModel, device: torch.device) -> int:
    """Padded tokens of a batch; 1 makes a batch of every row.

    Fixed by the device (a GPU by its size) and the model: batches decide the last bits of the
    result.
    Attention that picks its keys by an indexer counts padding among them in transformers, so rows
    that are padded would have other hidden states than alone.
    """
    if any(key in model.architecture.text_config for key in INDEXERS):
        return 1
    if device.type == "cpu":
        return CPU_BATCH_TOKENS
    width = model.architecture.hidden_size
    if width is None:
        return DEFAULT_BATCH_TOKENS
    tokens = gpu_batch_tokens(width, gpu_memory(device))
    # Scores of all pairs of tokens would be by far the largest part of a long batch.
    return min(tokens, DEFAULT_BATCH_TOKENS) if holds_scores(model.checkpoint) else tokens


def require_streamable(model: OpenModel, other: OpenModel, *, what: str, hint: str) -> None:
    """The two can be run layer beside layer. `what` names the other; `hint` is for its depth."""
    if other.architecture.num_layers != model.architecture.num_layers:
        raise ArchitectureError(
            f"{what} ({other.label}) has {other.architecture.num_layers} layers, "
            f"{model.label} has {model.architecture.num_layers}",
            hint=hint,
        )
    if other.architecture.quantised:
        raise ArchitectureError(
            f"{what} ({other.label}) is quantised ({other.architecture.quantised}) and cannot be "
            "run",
            hint=f"dequantise it first; {hint}",
        )


def check_same_tokens(
    domains: Sequence[Domain], tokenizer: Any, other: OpenModel, *, what: str, hint: str
) -> list[str]:
    """The other model must read the texts under the same numbers. Gives notices."""
    try:
        theirs: Any = load_tokenizer(other.checkpoint.tokenizer_folder)
    except TokenizerError:
        return [f"{what} has no tokenizer; it is taken to have the merged model's"]
    rows = [row for domain in domains for row in (*domain.rows, *domain.holdout)]
    used = torch.unique(torch.cat(rows)).tolist()
    ours_tokens = tokenizer.convert_ids_to_tokens(used)
    their_tokens = theirs.convert_ids_to_tokens(used)
    for number, ours, other_token in zip(used, ours_tokens, their_tokens, strict=True):
        if ours != other_token:
            raise TokenizerError(
                f"token {number} is {ours!r} in the merged model and {other_token!r} in {what}: "
                "they do not read the same text under the same numbers",
                hint=hint,
            )
    return []
