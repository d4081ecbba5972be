"""Everything about a diagnosis that can be refused before a layer is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from moemerge.architectures.opened import OpenModel, open_model
from moemerge.config.models import ModelRef
from moemerge.config.settings import DiagnosisSettings
from moemerge.diagnosis.results import MODEL
from moemerge.errors import UsageError
from moemerge.features.settings import batch_tokens, forward_dtype
from moemerge.lockstep.inputs import (
    check_names,
    check_same_tokens,
    read_domains,
    require_streamable,
)
from moemerge.lockstep.models import (
    PairedRouter,
    chosen_layers,
    pair_routers,
    require_calibratable,
    require_same_family,
    skipped_routers,
)
from moemerge.lockstep.swapped import pair_routing
from moemerge.runtime.devices import resolve_device
from moemerge.text.batches import DEFAULT_BATCH_TOKENS, Batch, make_batches
from moemerge.text.domains import Domain
from moemerge.text.rows import TextSource, check_files

# A batch's logits are the largest thing a diagnosis holds: (tokens, vocabulary).
LOGITS_BYTES = 2**31
SAME_MODELS = "models are compared token by token and layer by layer: they must be of one kind"

Reference = str | Path | ModelRef


@dataclass(frozen=True)
class DiagnosisRequest:
    """What to diagnose, with what. `sources` and `data` share their names."""

    model: Reference
    sources: Mapping[str, Reference]
    data: Mapping[str, Sequence[TextSource]]
    against: Sequence[Reference]
    settings: DiagnosisSettings
    label: str | None = None  # what to call a model whose folder is not to stay
    command: str | None = None  # what repeats this, where it is not `moemerge diagnose`


@dataclass(frozen=True)
class Prepared:
    """A diagnosis that was checked and can be run."""

    request: DiagnosisRequest
    subjects: tuple[OpenModel, ...]  # the diagnosed model, then those it is compared with
    sources: Mapping[str, OpenModel]
    layers: tuple[int, ...]
    routers: tuple[PairedRouter, ...]  # counterparts in sources and subjects, by their names
    domains: tuple[Domain, ...]
    batches: tuple[Batch, ...]
    device: torch.device
    dtype: torch.dtype
    notices: tuple[str, ...]

    @property
    def model(self) -> OpenModel:
        return self.subjects[0]


def prepare(request: DiagnosisRequest) -> Prepared:
    """Check names, files, models and text; make the batches."""
    settings = request.settings
    check_names(request.sources, request.data)
    if MODEL in request.sources:
        raise UsageError(
            f"a source cannot be named {MODEL!r}", hint="that name is the diagnosed model's own"
        )
    check_files(request.data)
    device = resolve_device(settings.device)
    subjects = _subjects(request)
    sources = {name: open_model(name, ref) for name, ref in request.sources.items()}
    model, others = subjects[0], [*subjects[1:], *sources.values()]
    for other in others:
        require_same_family(model, other, hint=SAME_MODELS)
        require_streamable(model, other, what=other.what, hint=SAME_MODELS)
    layers = chosen_layers(model, settings.layers, "diagnose")
    routers = pair_routers(model, others, layers)
    if settings.swaps:
        for source in sources.values():
            pair_routing(model, source)
    domains, notices = _text(request, subjects, sources)
    dtype = forward_dtype(settings.dtype, model)
    return Prepared(
        request=request,
        subjects=subjects,
        sources=sources,
        layers=layers,
        routers=routers,
        domains=domains,
        batches=make_batches(domains, batch_tokens=_batch_tokens(model, device, dtype)),
        device=device,
        dtype=dtype,
        notices=(*_passed_over(model, layers), *_gates(routers[0], others), *notices),
    )


def _subjects(request: DiagnosisRequest) -> tuple[OpenModel, ...]:
    model = open_model(MODEL, request.model)
    if request.label is not None:
        model.checkpoint.label = request.label
    require_calibratable(model, "diagnose")
    found = {MODEL: model}
    for ref in request.against:
        label = str(ref)
        if label in found or label in request.sources or label == model.label:
            raise UsageError(
                f"--against {label}: that name is taken",
                hint="name another model than the diagnosed one, its sources and the others, or "
                "write its path in full",
            )
        found[label] = open_model(label, ref)
    return tuple(found.values())


def _text(
    request: DiagnosisRequest, subjects: Sequence[OpenModel], sources: Mapping[str, OpenModel]
) -> tuple[tuple[Domain, ...], list[str]]:
    settings = request.settings
    domains, tokenizer = read_domains(subjects[0], sources, request.data, settings)
    notices = [notice for domain in domains for notice in domain.notices]
    if settings.holdout:
        domains = tuple(Domain(domain.name, domain.holdout) for domain in domains)
    for other in (*subjects[1:], *sources.values()):
        read = [domain for domain in domains if sources.get(domain.name, other) is other]
        read = read or list(domains)  # a model that is compared reads everything
        notices += check_same_tokens(read, tokenizer, other, what=other.what, hint=SAME_MODELS)
    return domains, notices


def vocabulary(model: OpenModel) -> int:
    """Rows of the output head, from headers."""
    names = model.architecture.embedding_names()
    name = names.head or names.input
    return model.checkpoint.tensors[name].rows if name else 1


def _batch_tokens(model: OpenModel, device: torch.device, dtype: torch.dtype) -> int:
    fits = LOGITS_BYTES // (vocabulary(model) * dtype.itemsize)
    return max(1, min(batch_tokens(model, device), DEFAULT_BATCH_TOKENS, fits))


def _passed_over(model: OpenModel, layers: Sequence[int]) -> list[str]:
    """Routers that cannot be compared; layers that were not asked for need no word."""
    return [
        f"layer {skipped.layer}: {skipped.router} is left out: {skipped.reason}"
        for skipped in skipped_routers(model, layers)
        if skipped.layer in layers or not skipped.reason.startswith("not chosen")
    ]


def _gates(pair: PairedRouter, others: Sequence[OpenModel]) -> list[str]:
    """Approximated gates, and models that choose otherwise by their config."""
    gate = pair.place.gate
    found = [gate.approximate] if gate is not None and gate.approximate else []
    for other in others:
        theirs = pair.sources[other.name].gate
        if theirs != gate:
            found.append(
                f"{other.what} routes otherwise by its config ({theirs}) than the diagnosed model "
                f"({gate}): choices are each model's own, distributions the diagnosed model's"
            )
    return found
