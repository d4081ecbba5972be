"""A merged model that writes under another model's routing: the bound that no router can beat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, logging

from moemerge.features.routers import anatomy
from moemerge.runtime.devices import resolve_device

# Prompts of one batch: two caches of a CPU's batch stay small, a GPU takes many at once.
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
    """What `model` writes when each token goes to the experts, with the weights, that the model
    `router` would choose after the same text."""
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
            # Joined by hand: decoding would tidy up spaces, and a token is a character.
            shown = tokenizer.convert_ids_to_tokens(row[:end])
            written[place] = "".join(t for t in shown if t not in tokenizer.all_special_tokens)
    return written


class _Pair:
    """Two models of one shape; the second's routers decide for both."""

    def __init__(self, follower: Any, leader: Any) -> None:
        self.follower, self.leader = follower, leader
        decided: dict[str, Any] = {}
        for router in anatomy(leader).routers:
            leader.get_submodule(router.path).register_forward_hook(_note(decided, router.path))
            follower.get_submodule(router.path).register_forward_hook(_obey(decided, router.path))

    def __call__(self, caches: tuple[Any, Any], **inputs: Tensor) -> Tensor:
        """The follower's logits after the last token, (rows, vocabulary)."""
        self.leader(past_key_values=caches[1], **inputs)
        logits: Tensor = self.follower(past_key_values=caches[0], **inputs).logits
        return logits[:, -1]


def _note(decided: dict[str, Any], path: str) -> Callable[..., None]:
    def hook(module: Any, args: Any, output: Any) -> None:
        decided[path] = output

    return hook


def _obey(decided: dict[str, Any], path: str) -> Callable[..., Any]:
    def hook(module: Any, args: Any, output: Any) -> Any:
        return decided[path]

    return hook


def _continue(
    pair: _Pair, prompts: Sequence[Tensor], new: int, end: int, device: torch.device
) -> Tensor:
    """Greedy tokens (rows, new); what follows an end token means nothing."""
    longest = max(map(len, prompts))
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (tokens, seen) in enumerate(zip(ids, mask, strict=True)):
        start = longest - len(prompts[row])  # padded on the left: all grow in the same column
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
    """A checkpoint in float32, ready to run."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval()
