"""The whole model in plain transformers, for comparison with the stream."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import zoo
from moemerge.checkpoint.reader import Checkpoint
from moemerge.text.batches import Batch, make_batches
from moemerge.text.domains import Domain

Features = dict[str, list[Tensor]]  # router path -> (tokens, d) per batch, in order of execution


def domains() -> list[Domain]:
    """Two domains with unequal rows, one of them with a row held out."""
    generator = torch.Generator().manual_seed(1)

    def rows(*lengths: int) -> tuple[Tensor, ...]:
        return tuple(torch.randint(3, 100, (n,), generator=generator) for n in lengths)

    return [
        Domain("math", rows(17, 23, 9)),
        Domain("code", rows(12, 12), held_out=Domain("code", rows(7))),
    ]


def batches() -> tuple[Batch, ...]:
    """A batch with padding, one without, one held out."""
    return make_batches(domains(), batch_tokens=80)


def routers(stream: Any) -> Iterator[Any]:
    """Every stop at a router, over all layers."""
    return (stop for _ in stream for stop in stream.routers())


def inputs_of(stop: Any) -> list[Tensor]:
    """A copy of a stop's inputs, in the order of the batches."""
    return [arrival.given[0].clone() for arrival in stop.arrivals]


def changed(folder: Path, out: Path, change: Callable[[dict[str, Tensor]], Any]) -> Checkpoint:
    """A copy of a model in one file, with other tensors."""
    out.mkdir()
    (out / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint.open(out)


def whole_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    name = zoo.read_config(folder)["architectures"][0]
    with zoo._quiet():
        return getattr(transformers, name).from_pretrained(folder, dtype=dtype).eval()


def row_losses(folder: Path, rows: Iterable[Tensor]) -> list[tuple[float, int]]:
    """The summed next-token loss of every row, and its number of predicted tokens."""
    model, found = whole_model(folder), []
    for row in rows:
        with torch.no_grad():
            logits = model(row[None]).logits[0, :-1].float()
        total = torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum")
        found.append((float(total), len(row) - 1))
    return found


def run_whole(
    model: Any, routers: Sequence[str], batches: Sequence[Batch]
) -> tuple[Features, list[Tensor]]:
    """Router inputs by hooks, and logits."""
    features: Features = {}
    now: list[Batch] = []

    def hook(path: str) -> Any:
        def see(module: Any, args: Any, kwargs: Any) -> None:
            x = args[0].reshape(-1, args[0].shape[-1])
            real = now[-1].mask.reshape(-1).to(x.device)
            features.setdefault(path, []).append(x[real].clone())

        return see

    handles = [
        model.get_submodule(path).register_forward_pre_hook(hook(path), with_kwargs=True)
        for path in routers
    ]
    logits = []
    with torch.no_grad():
        for batch in batches:
            now.append(batch)
            mask = batch.mask.long().to(model.device) if batch.padded else None
            ids = batch.input_ids.to(model.device)
            out = model(input_ids=ids, attention_mask=mask, use_cache=False)
            logits.append(out.logits)
    for handle in handles:
        handle.remove()
    return features, logits
