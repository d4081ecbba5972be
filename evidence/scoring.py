"""Generate with several small models at once, and check which problems they solve.

Models run in float32 whatever their checkpoints store, so that rounding does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from evidence.forward import Cache, Weights, hidden_states, logits, prepare, rotation
from evidence.layout import EOS, IDS, PAD, SPECIAL, Shape, encode, from_tensors, shape_of_config
from moemerge.checkpoint import Checkpoint
from moemerge.errors import ArchitectureError
from moemerge.lab.testbed.demo import LONGEST_ANSWER
from moemerge.lab.testbed.tasks import Problem, check_all
from moemerge.runtime.devices import resolve_device

# Prompts per batch; on a CPU the states of a small batch stay in its cache.
BATCH = {"cuda": 4096, "cpu": 128}
_PAD, _EOS = IDS[PAD], IDS[EOS]
_TEXT = {number: "" if token in SPECIAL else token for token, number in IDS.items()}


@torch.inference_mode()
def continue_texts(
    flat: Tensor, shape: Shape, prompts: Sequence[str], max_new_tokens: int
) -> list[list[str]]:
    """Return the greedy completions of the prompts by each model of (S, parameters).

    A completion ends before the end token or after `max_new_tokens`.
    """
    weights = prepare(flat, shape)
    # Prompts of similar length share a batch, which saves padding.
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    written = [[""] * len(prompts) for _ in flat]
    size = BATCH[flat.device.type]
    for start in range(0, len(order), size):
        places = order[start : start + size]
        batch = _Batch(weights, shape, [encode(prompts[p]) for p in places], max_new_tokens)
        tokens = batch.run().cpu()  # (S, B, new)
        for model, texts in enumerate(written):
            for place, row in zip(places, tokens[model].tolist(), strict=True):
                texts[place] = _decode(row)
    return written


def _decode(row: list[int]) -> str:
    end = row.index(_EOS) if _EOS in row else len(row)
    return "".join(_TEXT[token] for token in row[:end])


class _Batch:
    """A batch of prompts, padded on the left so that all grow in the same column."""

    def __init__(self, weights: Weights, shape: Shape, prompts: Sequence[Tensor], new: int) -> None:
        device = weights["head"].device
        models = len(weights["head"])
        longest = max(1, *map(len, prompts))
        self._weights, self._shape, self._new = weights, shape, new
        self._tokens = torch.full((len(prompts), longest), _PAD)
        for row, prompt in zip(self._tokens, prompts, strict=True):
            row[longest - len(prompt) :] = prompt
        self._tokens = self._tokens.to(device)
        self._pads = torch.tensor([longest - len(p) for p in prompts], device=device)  # (B,)
        columns = longest + new
        size = (models, len(prompts), shape.kv_heads, columns, shape.head)
        self._cache = Cache(
            *([torch.zeros(size, device=device) for _ in range(shape.layers)] for _ in "kv")
        )
        self._models = models

    def run(self) -> Tensor:
        """Return the new tokens (S, B, new), padded after an end token."""
        prompt = self._tokens.expand(self._models, -1, -1)
        token = self._next(prompt, 0)
        rows = torch.arange(prompt.shape[1], device=token.device)
        written = torch.full((*token.shape, self._new), _PAD, device=token.device)
        ended = torch.zeros_like(token, dtype=torch.bool)
        for number in range(self._new):
            written[:, rows, number] = torch.where(ended, _PAD, token)
            ended = ended | (token == _EOS)
            live = (~ended).any(0)  # in any model
            alive = int(live.sum())
            if alive == 0 or number + 1 == self._new:
                break
            if alive <= len(rows) // 2:
                token, ended, rows = token[:, live], ended[:, live], rows[live]
                self._keep(live)
            token = self._next(token[..., None], prompt.shape[2] + number)
        return written

    def _next(self, tokens: Tensor, column: int) -> Tensor:
        """Return the next token (S, B) after `tokens`, which start at `column`."""
        end = column + tokens.shape[2]
        columns = torch.arange(end, device=tokens.device)
        own = columns[column:]
        positions = (own - self._pads[:, None]).clamp(min=0)  # (B, L)
        # Tokens attend to earlier tokens except padding. A pad attends to itself, because its
        # softmax must not be empty.
        seen = (columns >= self._pads[:, None, None]) & (columns <= own[:, None])
        seen = seen | (columns == own[:, None])
        mask = torch.zeros(seen.shape, device=tokens.device).masked_fill_(~seen, float("-inf"))
        hidden, _ = hidden_states(
            self._weights,
            tokens,
            self._shape,
            rotation(positions, self._shape),
            mask[None, :, None],  # (1, B, 1, L, columns)
            cache=self._cache,
            column=column,
        )
        last = hidden.view(*tokens.shape, -1)[:, :, -1]
        return logits(self._weights, last).argmax(-1)

    def _keep(self, live: Tensor) -> None:
        """Keep only these prompts."""
        self._pads = self._pads[live]
        for kept in (self._cache.keys, self._cache.values):
            kept[:] = [tensor[:, live] for tensor in kept]


def load_flat(folder: Path) -> tuple[Tensor, Shape]:
    """Return a checkpoint's weights (parameters,) in float32, and its shape."""
    with Checkpoint.open(folder) as checkpoint:
        shape = shape_of_config(checkpoint.config, str(folder))
        return from_tensors(checkpoint, shape, str(folder)), shape


def generate(
    model_folder: Path,
    prompts: Sequence[str],
    *,
    device: str = "auto",
    max_new_tokens: int = LONGEST_ANSWER,
) -> list[str]:
    """Return a model's greedy completion of each prompt."""
    return generate_many([model_folder], prompts, device=device, max_new_tokens=max_new_tokens)[0]


def generate_many(
    model_folders: Sequence[Path],
    prompts: Sequence[str],
    *,
    device: str = "auto",
    max_new_tokens: int = LONGEST_ANSWER,
) -> list[list[str]]:
    """Run `generate` for several models of one shape; on a GPU at about the cost of one."""
    loaded = [load_flat(Path(folder)) for folder in model_folders]
    shapes = {shape for _, shape in loaded}
    if len(shapes) != 1:
        raise ArchitectureError(
            f"{len(model_folders)} models of {len(shapes)} different shapes cannot run together",
            hint="use models of one base",
        )
    on = resolve_device(device)
    flats = [flat for flat, _ in loaded]
    # On a CPU, batching over models gains nothing.
    stacks = [torch.stack(flats)] if on.type == "cuda" else [flat[None] for flat in flats]
    return [
        texts
        for stack in stacks
        for texts in continue_texts(stack.to(on), shapes.copy().pop(), prompts, max_new_tokens)
    ]


def accuracy(
    model_folder: Path, problems: Sequence[Problem], *, device: str = "auto"
) -> list[bool]:
    """Return which problems a model solves."""
    return accuracy_many([model_folder], problems, device=device)[0]


def accuracy_many(
    model_folders: Sequence[Path], problems: Sequence[Problem], *, device: str = "auto"
) -> list[list[bool]]:
    """Run `accuracy` for several models of one shape."""
    written = generate_many(model_folders, [p.prompt for p in problems], device=device)
    return [check_all(problems, texts) for texts in written]
