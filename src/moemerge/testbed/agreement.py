"""Whether two small models send the same tokens to the same experts, by running both whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from moemerge.errors import DataError
from moemerge.features.routers import anatomy
from moemerge.runtime.devices import resolve_device

# Padded tokens of one forward: what a CPU keeps in cache, and what keeps a GPU busy.
BATCH_TOKENS = {"cpu": 4096, "cuda": 131072}


@dataclass(frozen=True)
class RoutingAgreement:
    """How a model's routing differs from another's on the same text."""

    mismatch: float  # share of the reference's expert choices that the model does not make
    any_mismatch: float  # share of tokens with a mismatch in at least one layer
    kl: float  # mean KL(reference ‖ model) of the routing distributions
    mismatch_layers: tuple[float, ...]
    kl_layers: tuple[float, ...]
    tokens: int


@dataclass(frozen=True, eq=False)
class RecordedRouting:
    """The router logits of a model over some text, padding left out."""

    top_k: int
    logits: tuple[Tensor, ...]  # per router, in the order the model runs them: (tokens, experts)


def compare_routing(
    model: Path, reference: Path, text: Path, *, device: str = "auto"
) -> RoutingAgreement:
    """Run both models over the rows of `text` (JSON lines with `text`) and compare every choice."""
    rows = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    return compare_recorded(
        record_routing(model, rows, device=device), record_routing(reference, rows, device=device)
    )


def record_routing(folder: Path, rows: Sequence[str], *, device: str = "auto") -> RecordedRouting:
    """Run a model whole over `rows`, in batches of like length, and keep its router logits."""
    where = resolve_device(device)
    model = load_model(folder, where)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    seen: list[list[Tensor]] = []
    padding: list[Tensor] = []  # of the batch that is run, for the hooks
    for router in anatomy(model).routers:
        seen.append([])
        hook = _recorder(seen[-1], padding)
        model.get_submodule(router.path).register_forward_hook(hook)
    with torch.inference_mode():
        for ids, mask in _batches(tokenizer, rows, where):
            padding[:] = [mask]
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    return RecordedRouting(model.config.num_experts_per_tok, tuple(torch.cat(z) for z in seen))


def load_model(folder: Path, device: torch.device) -> Any:
    """A checkpoint in float32, ready to run."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval()


def compare_recorded(model: RecordedRouting, reference: RecordedRouting) -> RoutingAgreement:
    """Every choice of two models that ran over the same rows."""
    kl, missed = [], []
    for ours, theirs in zip(model.logits, reference.logits, strict=True):
        if ours.shape != theirs.shape:
            raise DataError(
                f"router logits of {tuple(ours.shape)} and {tuple(theirs.shape)} cannot be "
                "compared: the two models did not run over the same tokens"
            )
        z, r = ours.double().log_softmax(-1), theirs.double().log_softmax(-1)
        kl.append((r.exp() * (r - z)).sum(-1))  # (tokens,)
        hits = (_mask(ours, model.top_k) & _mask(theirs, model.top_k)).sum(-1)
        missed.append(1 - hits.double() / model.top_k)
    divergence, mismatch = torch.stack(kl), torch.stack(missed)  # (routers, tokens)
    return RoutingAgreement(
        mismatch=float(mismatch.mean()),
        any_mismatch=float((mismatch > 0).any(0).double().mean()),
        kl=float(divergence.mean()),
        mismatch_layers=tuple(mismatch.mean(-1).tolist()),
        kl_layers=tuple(divergence.mean(-1).tolist()),
        tokens=mismatch.shape[1],
    )


def _batches(
    tokenizer: Any, rows: Sequence[str], device: torch.device
) -> list[tuple[Tensor, Tensor]]:
    """Rows by length, as many at once as fit: ids and mask, both (rows, length)."""
    ids = [torch.tensor(row) for row in tokenizer(list(rows))["input_ids"]]
    ids.sort(key=len)
    batches, start = [], 0
    while start < len(ids):
        end = start + 1
        while end < len(ids) and (end + 1 - start) * len(ids[end]) <= BATCH_TOKENS[device.type]:
            end += 1
        piece = ids[start:end]
        padded = torch.nn.utils.rnn.pad_sequence(piece, batch_first=True)
        mask = torch.arange(padded.shape[1]) < torch.tensor([[len(row)] for row in piece])
        batches.append((padded.to(device), mask.to(device)))
        start = end
    return batches


def _recorder(into: list[Tensor], padding: list[Tensor]) -> Callable[[Any, Any, Any], None]:
    def record(module: Any, args: tuple[Tensor, ...], output: Any) -> None:
        x = args[0].reshape(-1, args[0].shape[-1])[padding[0].reshape(-1)]
        into.append(torch.nn.functional.linear(x, module.weight))

    return record


def _mask(logits: Tensor, top_k: int) -> Tensor:
    chosen = logits.topk(top_k, dim=-1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, chosen, True)
