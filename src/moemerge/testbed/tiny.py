"""Tiny OLMoE specialists made on the spot: random weights, real checkpoints.

They know nothing, so only their routing can be looked at. Each specialist is the base plus noise:
a little on every weight, much more on the routers, which is what fine-tuning with a balancing loss
does to a real one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

CHARACTERS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 +-*/=()[]{},.:;?!'\"_<>"
)
SPECIAL = ("<pad>", "<eos>", "<unk>")
# Relative size of the noise that makes a specialist of the base.
WEIGHT_NOISE = 0.1
ROUTER_NOISE = 0.6
ROWS = 96
HELD_OUT_ROWS = 32


@dataclass(frozen=True)
class Specialists:
    """Folders of a base and its specialists, and each specialist's text by name."""

    base: Path
    models: dict[str, Path]
    data: dict[str, Path]  # to calibrate with
    held_out: dict[str, Path]  # to measure on


def make_specialists(folder: Path, *, seed: int = 0) -> Specialists:
    """Write a base, two specialists and their text into `folder`. The same seed, the same bytes."""
    base = _base_model(seed)
    paths = {name: folder / name for name in ("base", *DOMAINS)}
    _save(base.state_dict(), base, paths["base"])
    for number, name in enumerate(DOMAINS, 1):
        _save(_specialise(base.state_dict(), seed + number), base, paths[name])
    data, held_out = {}, {}
    for number, (name, make) in enumerate(DOMAINS.items()):
        rows = list(_rows(make, random.Random(seed + number), ROWS + HELD_OUT_ROWS))
        data[name] = _write(folder / f"{name}.jsonl", rows[:ROWS])
        held_out[name] = _write(folder / f"{name}-held-out.jsonl", rows[ROWS:])
    return Specialists(paths["base"], {n: paths[n] for n in DOMAINS}, data, held_out)


def _base_model(seed: int) -> OlmoeForCausalLM:
    config = OlmoeConfig(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=64,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_experts=16,
        num_experts_per_tok=2,
        pad_token_id=0,
        eos_token_id=1,
        max_position_embeddings=256,
    )
    make: Callable[[OlmoeConfig], OlmoeForCausalLM] = OlmoeForCausalLM
    model = make(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Unit gain, so that hidden states and logits have the spread of a trained model.
                spread = parameter.shape[-1] ** -0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)
    return model


def _specialise(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, value in state.items():
        scale = ROUTER_NOISE if name.endswith("mlp.gate.weight") else WEIGHT_NOISE
        noise = torch.randn(value.shape, generator=generator)
        moved[name] = value + scale * value.std() * noise if value.dim() > 1 else value
    return moved


def _save(state: dict[str, torch.Tensor], model: OlmoeForCausalLM, folder: Path) -> None:
    model.save_pretrained(folder, state_dict=state)
    character_tokenizer().save_pretrained(folder)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character."""
    ids = {token: number for number, token in enumerate((*SPECIAL, *CHARACTERS))}
    inner = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    make: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    return make(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def _write(path: Path, rows: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return path


def _rows(make: Callable[[random.Random], str], chance: random.Random, count: int) -> Iterator[str]:
    for _ in range(count):
        yield make(chance)


def _sum(chance: random.Random) -> str:
    a, b, c = (chance.randrange(2, 99) for _ in range(3))
    return f"{a}+{b}*{c}: {b}*{c}={b * c}; {a}+{b * c}={a + b * c}"


def _call(chance: random.Random) -> str:
    word = "".join(chance.choices("abcdefgh", k=chance.randrange(3, 7)))
    n = chance.randrange(1, 4)
    return f"s='{word}'; s[::-1]=='{word[::-1]}'; s.upper()*{n}=='{word.upper() * n}'"


DOMAINS: dict[str, Callable[[random.Random], str]] = {"math": _sum, "code": _call}
