"""Requests for a diagnosis: the checks, and the models as they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from moemerge.config.job_settings import DiagnosisSettings
from moemerge.config.models import ModelLike
from moemerge.diagnosis.results import MODEL
from moemerge.errors import UsageError
from moemerge.families.opened import OpenModel, open_model
from moemerge.forward.losses import LOSS_TOKENS, NextTokenLoss
from moemerge.forward.settings import (
    StreamSettings,
    forward_dtype,
    logit_batch_tokens,
    vocabulary_size,
)
from moemerge.forward.walk import Member
from moemerge.repairs.experts import find_maps
from moemerge.repairs.inputs import (
    JobText,
    check_domain,
    check_names,
    check_same_tokens,
    read_text,
    require_streamable,
)
from moemerge.repairs.routers import (
    ChosenRouters,
    PairedRouter,
    pair_routing,
    require_calibratable,
    require_same_family,
    with_routers_of,
)
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.ranks import Ranks, own_device
from moemerge.text.batches import Batch, make_batches, own_share
from moemerge.text.domains import Domain
from moemerge.text.rows import TextSource, check_files

SAME_MODELS = (
    "models are compared token by token and layer by layer: they must share an architecture"
)


@dataclass(frozen=True)
class DiagnosisRequest:
    """The model, its sources and text. `sources` and `data` share their names.

    A domain without a source is measured against the settings' `base`.
    """

    model: ModelLike
    sources: Mapping[str, ModelLike]
    data: Mapping[str, Sequence[TextSource]]
    against: Sequence[ModelLike]
    settings: DiagnosisSettings
    # Files with the kept experts of sources that have more experts than the model.
    experts: Mapping[str, str | Path] = field(default_factory=dict)
    label: str | None = None  # the display name of a model in a temporary folder
    # Text that is only measured. Under the name of a source, the source is measured on it too.
    check: Mapping[str, Sequence[TextSource]] = field(default_factory=dict)
    command: str | None = None  # the command that repeats this, if it is not `moemerge diagnose`

    @property
    def without_source(self) -> tuple[str, ...]:
        """Domains without a source."""
        return tuple(name for name in self.data if name not in self.sources)

    @property
    def references(self) -> dict[str, ModelLike]:
        """The model that each domain is measured against: its source, or the base."""
        base = self.settings.base
        bases = {} if base is None else dict.fromkeys(self.without_source, base)
        return {**self.sources, **bases}


@dataclass(frozen=True)
class DiagnosisJob:
    """A checked diagnosis."""

    request: DiagnosisRequest
    subjects: tuple[OpenModel, ...]  # the diagnosed model, then those it is compared with
    sources: Mapping[str, OpenModel]  # the source of every domain, or the base
    routers: ChosenRouters  # counterparts in sources and compared models, by name
    text: JobText
    stream: StreamSettings
    notices: tuple[str, ...]
    ranks: Ranks

    @property
    def model(self) -> OpenModel:
        return self.subjects[0]

    @property
    def domains(self) -> tuple[Domain, ...]:
        """The rows to measure on: those that a repair holds out, or all if it holds out none.

        The notices name the domains of which none are held out.
        """
        if not self.request.settings.holdout:
            return self.text.domains
        return tuple(d.held_out or d for d in self.text.domains)

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """This rank's share of the text."""
        most = logit_batch_tokens(self.model, self.stream.device, self.stream.dtype)
        batches = make_batches((*self.domains, *self.text.check), batch_tokens=most)
        return own_share(batches, self.ranks)


def prepare(request: DiagnosisRequest, ranks: Ranks, text: JobText | None = None) -> DiagnosisJob:
    """Check names, files, models and text. The text may be passed if it was read before."""
    settings = request.settings
    references = request.references
    check_names(references, request.data)
    if settings.base is not None and not request.without_source:
        raise UsageError(
            "a base is given, but every domain has a source",
            hint='it is the reference of text without a source: `data={"general": FILE}`',
        )
    if MODEL in references:
        raise UsageError(
            f"a source cannot be named {MODEL!r}",
            hint="that name is reserved for the diagnosed model",
        )
    check_files(request.data)
    check_files(request.check, "check")
    device = own_device(resolve_device(settings.device))
    subjects = _subjects(request)
    sources = {name: open_model(name, ref) for name, ref in references.items()}
    model, others = subjects[0], [*subjects[1:], *sources.values()]
    for other in others:
        require_same_family(model, other, hint=SAME_MODELS)
        require_streamable(model, other, what=other.what, hint=SAME_MODELS)
    experts = find_maps(model, list(sources.values()), request.experts)
    routers = ChosenRouters.of(model, others, settings.layers, "diagnose", experts)
    if settings.swaps:
        for source in sources.values():
            if source.name in experts:
                raise UsageError(
                    f"{source.what} has other experts than {model.label}, so their routers cannot "
                    "be swapped",
                    hint="leave `swaps` out",
                )
            pair_routing(model, source)
    text = text or read_text(model, sources, request.data, settings, request.check)
    notices = [*_left_out(routers), *_gates(routers.pairs[0], others), *text.notices]
    if settings.holdout:
        notices += [
            f"{domain.name}: no rows are held out, so its figures are of rows that a repair is "
            "fitted to; they say little about other text"
            for domain in text.domains
            if not domain.holdout
        ]
    for other in others:
        read = [domain for domain in text.domains if sources.get(domain.name, other) is other]
        read = read or list(text.domains)  # compared models process all domains
        read += [
            d for d in text.check if other.name not in sources or d.name == check_domain(other.name)
        ]
        notices += check_same_tokens(read, text.tokenizer, other, what=other.what, hint=SAME_MODELS)
    dtype = forward_dtype(settings.dtype, model, device)
    stream = StreamSettings(device, dtype, settings.offload)
    return DiagnosisJob(request, subjects, sources, routers, text, stream, tuple(notices), ranks)


def _subjects(request: DiagnosisRequest) -> tuple[OpenModel, ...]:
    model = open_model(MODEL, request.model)
    if request.label is not None:
        model.checkpoint.label = request.label
    require_calibratable(model, "diagnose")
    subjects = {MODEL: model}
    for ref in request.against:
        label = str(ref)
        if label in subjects or label in request.references or label == model.label:
            raise UsageError(
                f"`against` names {label}, and that name is taken",
                hint="name another model than the diagnosed one, its sources and the others, or "
                "write its path in full",
            )
        subjects[label] = open_model(label, ref)
    return tuple(subjects.values())


def _left_out(routers: ChosenRouters) -> list[str]:
    """Yield notices about routers that cannot be compared, in the requested layers."""
    return [
        f"layer {skipped.layer}: {skipped.router} is left out: {skipped.reason}"
        for skipped in routers.skipped
        if skipped.layer in routers.layers or not skipped.reason.startswith("not chosen")
    ]


def _gates(pair: PairedRouter, others: Sequence[OpenModel]) -> list[str]:
    """Yield notices about approximated gates, and about models with another gate config."""
    gate = pair.info.gate
    notices = [gate.approximate] if gate is not None and gate.approximate else []
    for other in others:
        theirs = pair.sources[other.name].gate
        if theirs != gate:
            notices.append(
                f"{other.what} routes otherwise by its config ({theirs}) than the diagnosed model "
                f"({gate}): choices are each model's own, distributions the diagnosed model's"
            )
    return notices


# Logits, scores, probabilities and masks of a batch during comparison, all (tokens, K) in float64.
COMPARED_COPIES = 24


@dataclass(frozen=True)
class Side:
    """A model that runs to its end, where its loss is measured."""

    model: OpenModel
    loss: NextTokenLoss
    domains: tuple[str, ...] | None = None  # None: all
    # Of a model with another's routers, run on the domain of the source that is part of it.
    weights_of: str = ""
    routers_of: str = ""

    @property
    def member(self) -> Member:
        return Member(self.model.checkpoint, self.domains, "logits", self.loss.add)


def sides_of(job: DiagnosisJob) -> dict[str, Side]:
    """Return every model that is run, by name; the diagnosed one first."""
    sides = {model.name: Side(model, NextTokenLoss(job.ranks)) for model in job.subjects}
    for name, source in job.sources.items():
        own = (name, check_domain(name))
        sides[name] = Side(source, NextTokenLoss(job.ranks), own)
    for name, source in job.sources.items() if job.request.settings.swaps else ():
        for weights, routers in ((job.model, source), (source, job.model)):
            sides[f"{name}: {weights.name} with the routers of {routers.name}"] = Side(
                with_routers_of(weights, routers),
                NextTokenLoss(job.ranks),
                (name,),
                weights.name,
                routers.name,
            )
    return sides


def extra_bytes(job: DiagnosisJob) -> int:
    """Return the larger of one batch's logits and one batch's comparison."""
    largest = max(batch.input_ids.numel() for batch in job.batches)
    words = vocabulary_size(job.model)
    logits = largest * words * job.stream.dtype.itemsize + 2 * 4 * LOSS_TOKENS * words
    experts = max(pair.info.rows for pair in job.routers.pairs)
    return max(logits, COMPARED_COPIES * 8 * largest * experts)


def memory_hints(job: DiagnosisJob) -> list[str]:
    """Return advice for too little memory."""
    hints = ["lower `max_tokens` or `max_length`"]
    if job.request.settings.swaps:
        hints.append("without `swaps`, half the number of models run")
    if len(job.subjects) > 1:
        hints.append("diagnose the models one by one, without `against`")
    return hints
