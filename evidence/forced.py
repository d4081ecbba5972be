"""Generate with one model under another model's routing: an upper bound for any router."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, logging

from moemerge.forward.routers import anatomy
from moemerge.runtime.devices import resolve_device

# Prompts per batch.
BATCH = {"cpu": 128, "cuda": 2048}


@torch.inference_mode()
def generate_forced(
    model: Path,
    router: Path,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    device: str = "auto",
) -> list[str]:
    """Return greedy completions of `model` with the expert choices and weights of `router`."""
    where = resolve_device(device)
    pair = _Pair(_load(model, where), _load(router, where))
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    written = [""] * len(prompts)
    for start in range(0, len(order), BATCH[where.type]):
        places = order[start : start + BATCH[where.type]]
        ids = [torch.tensor(row) for row in tokenizer([prompts[p] for p in places])["input_ids"]]
        tokens = _continue(pair, ids, max_new_tokens, tokenizer.eos_token_id, where)
        for place, row in zip(places, tokens.tolist(), strict=True):
            end = row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else len(row)
            # Decoding would clean up spaces; every token is a character.
            shown = tokenizer.convert_ids_to_tokens(row[:end])
            written[place] = "".join(t for t in shown if t not in tokenizer.all_special_tokens)
    return written


class _Pair:
    """Two models of one shape; the second's routing is used in both."""

    def __init__(self, follower: Any, leader: Any) -> None:
        self.follower, self.leader = follower, leader
        routing: dict[str, Any] = {}
        for router in anatomy(leader).routers:
            leader.get_submodule(router.path).register_forward_hook(_record(routing, router.path))
            follower.get_submodule(router.path).register_forward_hook(_replay(routing, router.path))

    def __call__(self, caches: tuple[Any, Any], **inputs: Tensor) -> Tensor:
        """Return the follower's logits after the last token, (rows, vocabulary)."""
        self.leader(past_key_values=caches[1], **inputs)
        logits: Tensor = self.follower(past_key_values=caches[0], **inputs).logits
        return logits[:, -1]


def _record(routing: dict[str, Any], path: str) -> Callable[..., None]:
    def hook(module: Any, args: Any, output: Any) -> None:
        routing[path] = output

    return hook


def _replay(routing: dict[str, Any], path: str) -> Callable[..., Any]:
    def hook(module: Any, args: Any, output: Any) -> Any:
        return routing[path]

    return hook


def _continue(
    pair: _Pair, prompts: Sequence[Tensor], new: int, end: int, device: torch.device
) -> Tensor:
    """Return greedy tokens (rows, new); tokens after an end token are meaningless."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (tokens, seen) in enumerate(zip(ids, mask, strict=True)):
        start = longest - len(
            prompts[row]
        )  # padded on the left, so that all rows grow in the same column
        tokens[start:] = prompts[row]
        seen[start:] = 1
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    caches = (DynamicCache(), DynamicCache())
    columns: list[Tensor] = []
    ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    while len(columns) < new and not bool(ended.all()):
        logits = pair(caches, input_ids=ids, attention_mask=mask, position_ids=positions)
        ids = logits.argmax(-1, keepdim=True)
        columns.append(ids[:, 0])
        ended |= ids[:, 0] == end
        mask = torch.cat([mask, torch.ones_like(ids)], dim=-1)
        positions = positions[:, -1:] + 1
    return torch.stack(columns, dim=-1)


def _load(folder: Path, device: torch.device) -> Any:
    """Load a checkpoint in float32."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval()
