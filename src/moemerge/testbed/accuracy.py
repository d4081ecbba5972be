"""What share of problems a model solves, by letting it write, and how its routing agrees.

Models run in float32 whatever their checkpoints store, as rounding is not what is to be measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from moemerge import api
from moemerge.checkpoint import Checkpoint
from moemerge.errors import ArchitectureError
from moemerge.runtime.devices import resolve_device
from moemerge.testbed.network.forward import (
    Cache,
    Weights,
    hidden_states,
    logits,
    prepare,
    rotation,
)
from moemerge.testbed.network.layout import (
    EOS,
    IDS,
    PAD,
    SPECIAL,
    Shape,
    encode,
    from_tensors,
    shape_of_config,
)
from moemerge.testbed.tasks import Problem, check_all

# Prompts of one batch. A GPU takes many at once; on a CPU few, whose states stay in its cache.
BATCH = {"cuda": 4096, "cpu": 128}
_PAD, _EOS = IDS[PAD], IDS[EOS]
_TEXT = {number: "" if token in SPECIAL else token for token, number in IDS.items()}


@torch.inference_mode()
def continue_texts(
    flat: Tensor, shape: Shape, prompts: Sequence[str], max_new_tokens: int
) -> list[list[str]]:
    """What each model of (S, parameters) writes after each prompt: S lists in the prompts' order.

    A text ends with the end token, which is not shown, or after `max_new_tokens`.
    """
    weights = prepare(flat, shape)
    # Prompts of like length go together, so that little is padded.
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
    """Prompts of a batch, padded on the left so that all grow in the same column."""

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
        """New tokens (S, B, new), pads after an end."""
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
        """The likeliest token (S, B) after these, which begin at `column`."""
        end = column + tokens.shape[2]
        columns = torch.arange(end, device=tokens.device)
        asked = columns[column:]
        positions = (asked - self._pads[:, None]).clamp(min=0)  # (B, L)
        # A column may be seen by later ones unless it is padding. A pad sees itself, or its
        # softmax would have nothing to sum over.
        seen = (columns >= self._pads[:, None, None]) & (columns <= asked[:, None])
        seen = seen | (columns == asked[:, None])
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
        """Go on with some of the prompts."""
        self._pads = self._pads[live]
        for kept in (self._cache.keys, self._cache.values):
            kept[:] = [tensor[:, live] for tensor in kept]


LONGEST_ANSWER = 24  # tokens after which a model is stopped; no right answer is longer


def load_flat(folder: Path) -> tuple[Tensor, Shape]:
    """A checkpoint's weights (parameters,) in float32, and its shape."""
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
    """What a model writes after each prompt, taking the likeliest token each time."""
    return generate_many([model_folder], prompts, device=device, max_new_tokens=max_new_tokens)[0]


def generate_many(
    model_folders: Sequence[Path],
    prompts: Sequence[str],
    *,
    device: str = "auto",
    max_new_tokens: int = LONGEST_ANSWER,
) -> list[list[str]]:
    """`generate` for several models of one shape, at about the cost of one on a GPU."""
    loaded = [load_flat(Path(folder)) for folder in model_folders]
    shapes = {shape for _, shape in loaded}
    if len(shapes) != 1:
        raise ArchitectureError(
            f"{len(model_folders)} models of {len(shapes)} unlike shapes cannot run together",
            hint="give models of one base",
        )
    on = resolve_device(device)
    flats = [flat for flat, _ in loaded]
    # On a CPU models gain nothing from each other's company.
    stacks = [torch.stack(flats)] if on.type == "cuda" else [flat[None] for flat in flats]
    return [
        texts
        for stack in stacks
        for texts in continue_texts(stack.to(on), shapes.copy().pop(), prompts, max_new_tokens)
    ]


def accuracy(
    model_folder: Path, problems: Sequence[Problem], *, device: str = "auto"
) -> list[bool]:
    """Which problems a model solves."""
    return accuracy_many([model_folder], problems, device=device)[0]


def accuracy_many(
    model_folders: Sequence[Path], problems: Sequence[Problem], *, device: str = "auto"
) -> list[list[bool]]:
    """`accuracy` for several models of one shape."""
    written = generate_many(model_folders, [p.prompt for p in problems], device=device)
    return [check_all(problems, texts) for texts in written]


@dataclass(frozen=True)
class RoutingAgreement:
    """How a model's routing differs from a specialist's on the same text."""

    mismatch: float  # share of the specialist's expert choices that the model does not make
    any_mismatch: float  # share of tokens with a mismatch in at least one layer
    kl: float  # mean KL(specialist ‖ model) of the routing distributions
    mismatch_layers: tuple[float, ...]
    kl_layers: tuple[float, ...]
    tokens: int


def compare_routing(
    model: Path,
    specialists: Mapping[str, Path],
    texts: Mapping[str, Sequence[str]],
    *,
    device: str = "auto",
) -> dict[str, RoutingAgreement]:
    """Of each domain: the model against its specialist on its texts, by the product's diagnosis."""
    diagnosis = api.diagnose(
        model,
        sources=specialists,
        data={domain: [{"text": text} for text in own] for domain, own in texts.items()},
        device=device,
        dtype="float32",  # whatever checkpoints store: rounding is not what is to be measured
    )
    agreements = {}
    for domain in specialists:
        total, rows = diagnosis.total(domain), diagnosis.layers_of(domain=domain)
        agreements[domain] = RoutingAgreement(
            mismatch=total.mismatch,
            any_mismatch=total.any_mismatch,
            kl=total.kl,
            mismatch_layers=tuple(row.mismatch for row in rows),
            kl_layers=tuple(row.kl for row in rows),
            tokens=total.tokens,
        )
    return agreements
