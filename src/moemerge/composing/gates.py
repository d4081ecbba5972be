"""Compute the routers of a composed model from prompts, or draw them at random."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moemerge.architectures.opened import OpenModel
from moemerge.composing.settings import ExpertEntry
from moemerge.errors import ArchitectureError, DataError
from moemerge.features.settings import StreamSettings
from moemerge.features.stream import ModelStream
from moemerge.runtime.progress import Progress
from moemerge.text.batches import make_batches
from moemerge.text.domains import Domain
from moemerge.text.tokens import load_tokenizer

RANDOM_STD = 0.02  # the usual spread of new weights
# Rows with a higher cosine similarity choose their experts together.
SIMILAR = 0.99


def random_rows(layers: Sequence[int], rows: int, width: int, seed: int) -> dict[int, Tensor]:
    """Return random rows for each layer, (rows, width)."""
    drawn = {}
    for layer in layers:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + layer)
        drawn[layer] = RANDOM_STD * torch.randn(rows, width, generator=generator)
    return drawn


@dataclass(frozen=True)
class PromptTokens:
    """The prompts of one expert as tokens."""

    positive: tuple[Tensor, ...]  # each (tokens,), int64
    negative: tuple[Tensor, ...]


def tokenize_prompts(base: OpenModel, entries: Iterable[ExpertEntry]) -> list[PromptTokens]:
    """Return the prompts of each expert, by the base's tokenizer."""
    tokenizer = load_tokenizer(base.checkpoint.tokenizer_folder)

    def ids(text: str) -> Tensor:
        found = torch.tensor(tokenizer(text)["input_ids"], dtype=torch.int64)
        if not len(found):
            raise DataError(f"the prompt {text!r:.80} has no token")
        return found

    prompts = [
        PromptTokens(
            tuple(map(ids, entry.positive_prompts)), tuple(map(ids, entry.negative_prompts))
        )
        for entry in entries
    ]
    require_known(base, [row for p in prompts for row in (*p.positive, *p.negative)])
    return prompts


def require_known(base: OpenModel, rows: Iterable[Tensor]) -> None:
    """Refuse tokens without a row of the base's embedding."""
    name = base.architecture.embedding_names().input
    if name is None:
        raise ArchitectureError(f"{base.label} has no input embedding")
    largest, known = max(int(row.max()) for row in rows), base.checkpoint.tensors[name].rows
    if largest >= known:
        raise DataError(
            f"{base.label}: its tokenizer returns token {largest}, its embedding has {known} rows",
            hint="tokenizer and weights do not belong together, or the embedding must be resized",
        )


def embedded_rows(
    base: OpenModel, prompts: Sequence[PromptTokens], layers: Sequence[int]
) -> dict[int, Tensor]:
    """Return one row per expert, the same for all layers: the sum of its prompts' embeddings.

    The sums of positive and negative prompts are scaled to length 1 before they are subtracted.
    """
    name = base.architecture.embedding_names().input
    assert name is not None  # `require_known` has checked it

    def total(rows: Sequence[Tensor]) -> Tensor:
        ids = torch.cat(list(rows)).tolist()
        found = [base.checkpoint.read(name, (i, i + 1))[0].double() for i in ids]
        return _unit(torch.stack(found).sum(dim=0))

    rows = [
        _unit(total(p.positive) - total(p.negative) if p.negative else total(p.positive))
        for p in prompts
    ]
    return dict.fromkeys(layers, torch.stack(rows))


def hidden_rows(
    base: OpenModel,
    prompts: Sequence[PromptTokens],
    layers: Sequence[int],
    settings: StreamSettings,
    progress: Progress,
) -> dict[int, Tensor]:
    """Return one row per expert and layer: the mean over its prompts of the layer's input at the
    last token, minus the mean over its negative prompts, scaled to length 1."""
    domains = [
        Domain(f"{number} {sign}", rows)
        for number, p in enumerate(prompts)
        for sign, rows in (("+", p.positive), ("-", p.negative))
        if rows
    ]
    batches = make_batches(domains, batch_tokens=1)  # one prompt each: no padding
    found: dict[int, Tensor] = {}
    with ModelStream(base.checkpoint, batches, settings, progress=progress) as stream:
        stream.stop_at_layers(inputs=True)
        for stop in stream:
            if stop.kind != "layer" or stop.layer not in layers:
                continue
            means = {
                d.name: torch.stack([x[-1].double() for x in stop.inputs(d.name)]).mean(dim=0)
                for d in domains
            }
            rows = [
                _unit(means[f"{n} +"] - means[f"{n} -"] if p.negative else means[f"{n} +"])
                for n, p in enumerate(prompts)
            ]
            found[stop.layer] = torch.stack(rows).cpu()
    return found


def _unit(row: Tensor) -> Tensor:
    length = float(row.norm())
    if length == 0.0:
        raise DataError(
            "the positive and negative prompts of an expert cancel out",
            hint="use prompts that differ",
        )
    return row / length


def similar_experts(gates: dict[int, Tensor]) -> list[int]:
    """Return the layers in which two experts have almost the same row."""
    found = []
    for layer, rows in gates.items():
        unit = rows / rows.norm(dim=1, keepdim=True)
        cosine = unit @ unit.T - 2 * torch.eye(len(unit), dtype=unit.dtype)
        if float(cosine.max()) > SIMILAR:
            found.append(layer)
    return found
