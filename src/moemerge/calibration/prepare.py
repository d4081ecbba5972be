"""Everything that can be refused, before the first layer is read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moemerge.checkpoint import check_output, require_space
from moemerge.config.calibration import CalibrationSettings
from moemerge.config.layers import LayerSelection
from moemerge.config.models import ModelRef
from moemerge.errors import ArchitectureError, DataError, TokenizerError, UsageError
from moemerge.features.batches import DEFAULT_BATCH_TOKENS, Batch, make_batches
from moemerge.features.text import SUFFIXES, Domain, TextOptions, load_domains, load_tokenizer
from moemerge.lockstep.models import (
    MERGED,
    OpenModel,
    PairedRouter,
    SkippedRouter,
    chosen_layers,
    digest_routers,
    gate_notices,
    open_model,
    pair_routers,
    require_calibratable,
    require_same_family,
    skipped_routers,
)
from moemerge.registry import did_you_mean
from moemerge.runtime.devices import dtype_name, parse_dtype, resolve_device

# Report, card and config beside the weights.
COMPANION_BYTES = 16 * 2**20
# A CPU gains nothing from long batches, and their temporaries are the largest thing it holds.
CPU_BATCH_TOKENS = 2048
# They say how a run is done; its result does not depend on them.
NOT_IN_KEY = ("offload", "strict", "device", "dtype")

Reference = str | Path | ModelRef


@dataclass(frozen=True)
class CalibrationRequest:
    """What to calibrate, with what, to where. `sources` and `data` share their names."""

    merged: Reference
    out: Path
    sources: Mapping[str, Reference]
    data: Mapping[str, Sequence[str | Path]]
    settings: CalibrationSettings
    overwrite: bool = False
    resume: bool = False
    # The merged folder was made by this very run and goes when it ends: its config tells all,
    # and unchanged shards need no copy.
    passing: bool = False


@dataclass(frozen=True)
class Prepared:
    """A calibration that was checked and can be run."""

    request: CalibrationRequest
    merged: OpenModel
    sources: Mapping[str, OpenModel]
    layers: tuple[int, ...]
    routers: tuple[PairedRouter, ...]
    skipped: tuple[SkippedRouter, ...]
    domains: tuple[Domain, ...]
    batches: tuple[Batch, ...]
    device: torch.device
    dtype: torch.dtype
    notices: tuple[str, ...]
    key: Mapping[str, Any]  # what the result depends on: two runs with one key end alike

    @property
    def streams_sources(self) -> bool:
        return self.request.settings.targets == "source-features"


def prepare(request: CalibrationRequest) -> Prepared:
    """Check names, files, models, space and text; make the batches."""
    settings = request.settings
    check_names(request.sources, request.data)
    check_files(request.data)
    device = resolve_device(settings.device)
    merged = open_model(MERGED, request.merged)
    require_calibratable(merged)
    sources = {name: open_model(name, ref) for name, ref in request.sources.items()}
    inputs = [f for model in (merged, *sources.values()) for f in model.checkpoint.folders]
    check_output(request.out, overwrite=request.overwrite, inputs=inputs)
    require_space(request.out, merged.checkpoint.total_bytes + COMPANION_BYTES)
    for source in sources.values():
        require_same_family(merged, source)
    layers = chosen_layers(merged, settings.layers)
    routers = pair_routers(merged, list(sources.values()), layers)
    domains, notices = _text(request, merged, sources)
    dtype = forward_dtype(settings.dtype, merged)
    return Prepared(
        request=request,
        merged=merged,
        sources=sources,
        layers=layers,
        routers=routers,
        skipped=skipped_routers(merged, layers),
        domains=domains,
        batches=make_batches(domains, batch_tokens=batch_tokens(device)),
        device=device,
        dtype=dtype,
        notices=(*gate_notices(merged, list(sources.values()), routers[0]), *notices),
        key=_key(request, merged, sources, routers, domains, device, dtype),
    )


def check_names(sources: Mapping[str, object], data: Mapping[str, object]) -> None:
    """A source and its text are paired by name; each needs the other."""
    if not sources:
        raise UsageError(
            "no source given", hint="name each model that was merged: --source NAME=MODEL"
        )
    problems = [
        f"data {name!r} has no source of that name{did_you_mean(name, sources)}"
        for name in data
        if name not in sources
    ]
    problems += [
        f"source {name!r} has no data{did_you_mean(name, [n for n in data if n not in sources])}"
        for name in sources
        if name not in data
    ]
    if problems:
        raise UsageError(
            "; ".join(problems), hint="every source needs its text: --source A=MODEL --data A=FILE"
        )


def check_files(data: Mapping[str, Sequence[str | Path]]) -> None:
    """Every file exists and is of a kind that can be read."""
    for name, files in data.items():
        for file in map(Path, files):
            if not file.name.endswith(SUFFIXES):
                raise DataError(
                    f"data {name!r}: {file} is of an unknown kind {file.suffix!r}",
                    hint=f"use {', '.join(SUFFIXES)}",
                )
            if not file.is_file():
                raise DataError(f"data {name!r}: no such file {file}")


def forward_dtype(name: str, merged: OpenModel) -> torch.dtype:
    """`auto` is the dtype of most of the checkpoint's bytes: what the model runs in elsewhere."""
    if name != "auto":
        return parse_dtype(name)
    bytes_of: dict[torch.dtype, int] = {}
    for info in merged.checkpoint.tensors.values():
        if info.dtype.is_floating_point:
            bytes_of[info.dtype] = bytes_of.get(info.dtype, 0) + info.nbytes
    return max(bytes_of, key=bytes_of.__getitem__, default=torch.float32)


def batch_tokens(device: torch.device) -> int:
    """Fixed by the kind of device alone: batches decide the last bits of the result."""
    return CPU_BATCH_TOKENS if device.type == "cpu" else DEFAULT_BATCH_TOKENS


def settings_data(settings: CalibrationSettings) -> dict[str, Any]:
    """The settings as plain data."""
    values = {name: getattr(settings, name) for name in CalibrationSettings.model_fields}
    return {n: str(v) if isinstance(v, LayerSelection) else v for n, v in values.items()}


# --- text ---------------------------------------------------------------------------------------


def _text(
    request: CalibrationRequest, merged: OpenModel, sources: Mapping[str, OpenModel]
) -> tuple[tuple[Domain, ...], list[str]]:
    settings = request.settings
    tokenizer = load_tokenizer(merged.checkpoint.path)
    options = TextOptions(
        max_length=settings.max_length,
        max_tokens=settings.max_tokens,
        limit=settings.limit,
        holdout=settings.holdout,
        seed=settings.seed,
    )
    # In the sources' order, so that the order of --data does not matter.
    files = {name: list(request.data[name]) for name in sources}
    domains = load_domains(files, tokenizer, options)
    notices: list[str] = []
    if settings.targets == "source-features":
        for domain in domains:
            source = sources[domain.name]
            _require_streamable(merged, source)
            notices += _check_tokens(domain, tokenizer, source)
    return domains, notices


def _require_streamable(merged: OpenModel, source: OpenModel) -> None:
    if source.architecture.num_layers != merged.architecture.num_layers:
        raise ArchitectureError(
            f"source {source.name!r} ({source.label}) has {source.architecture.num_layers} layers, "
            f"{merged.label} has {merged.architecture.num_layers}",
            hint="--targets source-features needs sources of the merged model's depth",
        )
    if source.architecture.quantised:
        raise ArchitectureError(
            f"source {source.name!r} ({source.label}) is quantised "
            f"({source.architecture.quantised}) and cannot be run",
            hint="dequantise it, or use --targets merged-features, which reads its routers alone",
        )


def _check_tokens(domain: Domain, tokenizer: Any, source: OpenModel) -> list[str]:
    """The source must read the same tokens under the same numbers as the merged model does."""
    try:
        theirs: Any = load_tokenizer(source.checkpoint.path)
    except TokenizerError:
        return [f"source {source.name!r} has no tokenizer; it is taken to have the merged model's"]
    rows = [*domain.rows, *domain.holdout]
    used = torch.unique(torch.cat(rows)).tolist()
    ours_tokens = tokenizer.convert_ids_to_tokens(used)
    their_tokens = theirs.convert_ids_to_tokens(used)
    for number, ours, other in zip(used, ours_tokens, their_tokens, strict=True):
        if ours != other:
            raise TokenizerError(
                f"token {number} is {ours!r} in the merged model and {other!r} in source "
                f"{source.name!r}: they do not read the same text under the same numbers",
                hint="use --targets merged-features, which runs the merged model alone",
            )
    return []


# --- the key ------------------------------------------------------------------------------------


def _key(
    request: CalibrationRequest,
    merged: OpenModel,
    sources: Mapping[str, OpenModel],
    routers: Sequence[PairedRouter],
    domains: Sequence[Domain],
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    settings = settings_data(request.settings)
    whole = request.settings.targets == "source-features"
    merged_digest = digest_routers(merged, [pair.place for pair in routers])
    digests = {
        name: digest_routers(source, [pair.sources[name] for pair in routers])
        + (source.checkpoint.fingerprint() if whole else "")
        for name, source in sources.items()
    }
    return {
        "merged": _sha((merged_digest + merged.checkpoint.fingerprint()).encode()),
        "order": list(sources),  # sums run in it, so the last bits depend on it
        "sources": {name: _sha(text.encode()) for name, text in digests.items()},
        "data": {domain.name: _digest(domain) for domain in domains},
        "settings": {
            **{name: value for name, value in settings.items() if name not in NOT_IN_KEY},
            "device": device.type,
            "dtype": dtype_name(dtype),
        },
    }


def _digest(domain: Domain) -> str:
    digest = hashlib.sha256()
    for rows in (domain.rows, domain.holdout):
        digest.update(len(rows).to_bytes(8, "little"))
        for row in rows:
            digest.update(len(row).to_bytes(8, "little"))
            digest.update(row.numpy().tobytes())
    return digest.hexdigest()


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
