"""Measure a small model: the problems it solves, and how its routing agrees with specialists.

Models run in float32 whatever their checkpoints store, so that rounding does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moemerge import api
from moemerge.config.faults import parse_settings
from moemerge.generation.engine import CompletionRequest
from moemerge.generation.settings import GenerationSettings
from moemerge.generation.transformers_engine import TransformersEngine
from moemerge.runtime.progress import Silent
from moemerge.testbed.tasks import Problem, check_all
from moemerge.text.tokens import load_tokenizer, prompt_tokens

LONGEST_ANSWER = 24  # tokens; no correct answer is longer


def generate(
    model: Path,
    prompts: Sequence[str],
    *,
    device: str = "auto",
    max_new_tokens: int = LONGEST_ANSWER,
) -> list[str]:
    """Return a model's greedy completion of each prompt."""
    values = {
        "max_new_tokens": max_new_tokens,
        "temperature": 0.0,
        "device": device,
        "dtype": "float32",
    }
    settings = parse_settings(GenerationSettings, values, "the demo")
    tokenizer = load_tokenizer(model)
    engine = TransformersEngine(model, tokenizer, settings, Silent())
    rows = prompt_tokens(prompts, tokenizer)
    wanted = [CompletionRequest(place, 0, tuple(row)) for place, row in enumerate(rows)]
    completions = {done.prompt: done.text for done in engine.generate(wanted, len(wanted))}
    engine.close()
    return [completions[place] for place in range(len(prompts))]


def accuracy(model: Path, problems: Sequence[Problem], *, device: str = "auto") -> list[bool]:
    """Return which problems a model solves."""
    return check_all(problems, generate(model, [p.prompt for p in problems], device=device))


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
    """Compare a model's routing with each domain's specialist on the domain's texts."""
    diagnosis = api.diagnose(
        model,
        sources=specialists,
        data={domain: [{"text": text} for text in own] for domain, own in texts.items()},
        device=device,
        dtype="float32",
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
