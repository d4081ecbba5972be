"""Checks of models and texts that are streamed in step, before any work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from moemerge.checkpoint.model_card import CONFIG_NAME
from moemerge.config.fields import LayerSelection
from moemerge.config.models import ModelRef
from moemerge.config.repairs import check_names as check_names
from moemerge.config.requests import BASE
from moemerge.config.settings import ForwardSettings
from moemerge.config.yaml_lines import read_yaml
from moemerge.errors import ArchitectureError, MoeMergeError, TokenizerError, UsageError
from moemerge.families.opened import OpenModel
from moemerge.registry import did_you_mean
from moemerge.runtime.files import read_utf8
from moemerge.text.domains import Domain, TextSettings, load_domain, load_domains
from moemerge.text.rows import TextSource
from moemerge.text.tokens import load_tokenizer

S = TypeVar("S", bound=ForwardSettings)

Reference = str | Path | ModelRef


@dataclass(frozen=True)
class RepairRequest(Generic[S]):
    """The model to repair, its sources and their text under the same names, and the output."""

    merged: Reference
    out: Path
    sources: Mapping[str, Reference]
    data: Mapping[str, Sequence[TextSource]]
    settings: S
    weights: Mapping[str, float] = field(default_factory=dict)  # of sources; default: 1
    # Text that is only measured, before and after.
    check: Mapping[str, Sequence[TextSource]] = field(default_factory=dict)
    # Files with the kept experts of sources that have more experts than the model.
    experts: Mapping[str, str | Path] = field(default_factory=dict)
    overwrite: bool = False
    resume: bool = False  # never replace unfinished work, not even if `overwrite`
    # The same run made the merged folder and removes it at the end: its config is complete, and
    # unchanged shards can be linked instead of copied.
    temporary: bool = False
    # Names earlier merges of the same config in place of their temporary folders.
    shown: Callable[[str], str] = str
    # If False, everything is computed and reported, but neither OUT nor a journal is written.
    write: bool = True
    # The data, if they were read with the same settings before.
    text: JobText | None = None

    @property
    def replaces_unfinished(self) -> bool:
        """Whether unfinished work of another run may be replaced."""
        return self.overwrite and not self.resume


def settings_data(settings: Any) -> dict[str, Any]:
    """Return a job's settings as plain data."""
    values = {name: getattr(settings, name) for name in type(settings).model_fields}
    return {n: str(v) if isinstance(v, LayerSelection) else v for n, v in values.items()}


LARGEST_WEIGHT = 1e9  # with larger ratios, sums in float32 would drop a source


def source_weights(given: Mapping[str, float], sources: Collection[str]) -> dict[str, float]:
    """Return how much each source counts: 1 by default, scaled to a mean of 1."""
    for name, weight in given.items():
        if name not in sources:
            raise UsageError(
                f"a weight for {name!r}, which is not a source{did_you_mean(name, sources)}",
                hint=f"sources: {', '.join(sources)}",
            )
        if not 1 / LARGEST_WEIGHT <= weight <= LARGEST_WEIGHT:
            raise UsageError(
                f"the weight of {name!r} is {weight:g}, expected a number from "
                f"{1 / LARGEST_WEIGHT:g} to {LARGEST_WEIGHT:g}",
                hint="only the ratio of the weights counts",
            )
    weights = {name: float(given.get(name, 1.0)) for name in sources}
    mean = math.fsum(weights.values()) / len(weights)
    return {name: weight / mean for name, weight in weights.items()}


@dataclass(frozen=True)
class JobText:
    """The text of a job, tokenized by one model's tokenizer."""

    domains: tuple[Domain, ...]
    tokenizer: Any
    seconds: float  # taken to read and tokenize it
    check: tuple[Domain, ...] = ()  # text that is only measured

    @property
    def notices(self) -> list[str]:
        domains = (*self.domains, *self.check)
        return list(dict.fromkeys(notice for domain in domains for notice in domain.notices))


def read_text(
    model: OpenModel,
    sources: Collection[str],
    data: Mapping[str, Sequence[TextSource]],
    settings: ForwardSettings,
    check: Mapping[str, Sequence[TextSource]] | None = None,
) -> JobText:
    """Tokenize the text of each source with the model's tokenizer, and text to check."""
    begin = time.perf_counter()
    tokenizer = load_tokenizer(model.checkpoint.tokenizer_folder)
    # In the sources' order, so that the order of --data does not matter.
    chosen = {name: data[name] for name in sources}
    bounds = TextSettings.of(settings, answers=True)
    domains = load_domains(chosen, tokenizer, bounds)
    whole = replace(bounds, holdout=0.0)
    checked = tuple(
        load_domain(check_domain(name), text, tokenizer, whole)
        for name, text in (check or {}).items()
    )
    return JobText(domains, tokenizer, time.perf_counter() - begin, checked)


def check_domain(name: str) -> str:
    """Return the domain of the check text of this name, which a source may have too."""
    return f"check {name}"


def require_streamable(model: OpenModel, other: OpenModel, *, what: str, hint: str) -> None:
    """Check that two models can be streamed in step.

    `what` describes the other one; `hint` is the advice if their depths differ.
    """
    if other.architecture.num_layers != model.architecture.num_layers:
        raise ArchitectureError(
            f"{what} ({other.label}) has {other.architecture.num_layers} layers, "
            f"{model.label} has {model.architecture.num_layers}",
            hint=hint,
        )
    if other.architecture.quantised:
        raise ArchitectureError(
            f"{what} ({other.label}) is quantised in a way that is not read "
            f"({other.architecture.quantised})",
            hint=f"dequantise it first; {hint}",
        )


def check_same_tokens(
    domains: Sequence[Domain], tokenizer: Any, other: OpenModel, *, what: str, hint: str
) -> list[str]:
    """Check that the other model has the same token ids for the text. Return warnings."""
    try:
        theirs: Any = load_tokenizer(other.checkpoint.tokenizer_folder)
    except TokenizerError:
        return [f"{what} has no tokenizer; the merged model's is assumed"]
    rows = [row for domain in domains for row in (*domain.rows, *domain.holdout)]
    used = torch.unique(torch.cat(rows)).tolist()
    ours_tokens = tokenizer.convert_ids_to_tokens(used)
    their_tokens = theirs.convert_ids_to_tokens(used)
    for number, ours, other_token in zip(used, ours_tokens, their_tokens, strict=True):
        if ours != other_token:
            raise TokenizerError(
                f"token {number} is {ours!r} in the merged model and {other_token!r} in {what}: "
                "their tokenizers assign different ids to the same text",
                hint=hint,
            )
    return []


def check_source_text(
    model: OpenModel, sources: Mapping[str, OpenModel], text: JobText, hint: str
) -> list[str]:
    """Check that each source can process its domain's text in step with the model.

    Return warnings.
    """
    notices: list[str] = []
    for domain in text.domains:
        source = sources[domain.name]
        what = f"source {source.name!r}"
        require_streamable(model, source, what=what, hint=hint)
        notices += check_same_tokens([domain], text.tokenizer, source, what=what, hint=hint)
    return notices


def base_notices(
    request: RepairRequest[Any],
    merged: OpenModel,
    sources: Mapping[str, OpenModel],
    *,
    pruned: bool = False,
) -> list[str]:
    """Return how the models are read, and a warning if no source is the base.

    `pruned` is whether a source has more experts than the model, so that it is the original.
    """
    read = [n for model in (merged, *sources.values()) for n in model.checkpoint.notices]
    base = _base_of(merged.checkpoint.path)
    if pruned or BASE in sources or (base is not None and _is_among(base, sources, request)):
        return read
    if request.temporary:  # a config with a merge and a repair is run
        remedy = "add `base: general.jsonl` under `data:`"
        if base is None:
            remedy += ", and `sources: {base: BASE}` to the block of the repair"
    else:
        name = repr(base or "BASE")
        remedy = f'add `sources={{**sources, "base": {name}}}` '
        remedy += '`data={**data, "base": "general.jsonl"}`'
    return [
        *read,
        "no source is the base model, so what the base can do beyond these domains may be lost: a "
        f"few dozen rows of each ability that must remain keep it; {remedy}",
    ]


def _is_among(base: str, sources: Mapping[str, OpenModel], request: RepairRequest[Any]) -> bool:
    """Return whether the base is one of the sources: the same hub id, or the same folder."""
    folders = {source.checkpoint.path.resolve() for source in sources.values()}
    return base in map(str, request.sources.values()) or Path(base).resolve() in folders


def _base_of(folder: Path) -> str | None:
    """Return the base model in the config of a moemerge folder."""
    path = folder / CONFIG_NAME
    try:
        data = read_yaml(read_utf8(path), str(path)).data
    except MoeMergeError:
        return None  # another tool merged it
    base = data.get("base_model") if isinstance(data, dict) else None
    return str(base) if isinstance(base, str) else None
