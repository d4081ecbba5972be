"""Whether a small model sends the same tokens to the same experts as specialists do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moemerge import api


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
