"""Everything that can be refused, before the first layer is read."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moemerge.architectures.opened import OpenModel, open_model
from moemerge.checkpoint import check_output, require_space
from moemerge.config.calibration import CalibrationSettings
from moemerge.config.layers import LayerSelection
from moemerge.config.models import ModelRef
from moemerge.features.settings import batch_tokens, forward_dtype
from moemerge.lockstep.inputs import (
    check_names,
    check_same_tokens,
    read_domains,
    require_streamable,
)
from moemerge.lockstep.models import (
    MERGED,
    PairedRouter,
    SkippedRouter,
    chosen_layers,
    digest_routers,
    gate_notices,
    pair_routers,
    require_calibratable,
    require_same_family,
    skipped_routers,
)
from moemerge.runtime.devices import dtype_name, resolve_device
from moemerge.text.batches import Batch, make_batches
from moemerge.text.domains import Domain
from moemerge.text.rows import TextSource, check_files

# Report, card and config beside the weights.
COMPANION_BYTES = 16 * 2**20
MERGED_ALONE = "--targets merged-features runs the merged model alone and reads sources' routers"
# They say how a run is done; its result does not depend on them.
NOT_IN_KEY = ("offload", "strict", "device", "dtype")

Reference = str | Path | ModelRef


@dataclass(frozen=True)
class CalibrationRequest:
    """What to calibrate, with what, to where. `sources` and `data` share their names."""

    merged: Reference
    out: Path
    sources: Mapping[str, Reference]
    data: Mapping[str, Sequence[TextSource]]
    settings: CalibrationSettings
    overwrite: bool = False
    resume: bool = False
    # The merged folder was made by this very run and goes when it ends: its config tells all,
    # and unchanged shards need no copy.
    passing: bool = False
    # Without it routers are solved for and reported on; nothing is written, not even a journal.
    write: bool = True


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
    text_seconds: float  # taken to read and tokenize the text

    @property
    def streams_sources(self) -> bool:
        return self.request.settings.targets == "source-features"


Opened = Callable[[OpenModel, torch.device, torch.dtype], None]


def prepare(request: CalibrationRequest, opened: Opened | None = None) -> Prepared:
    """Check names, files, models, space and text; make the batches.

    `opened` is called early, when the merged model is known to be one that can be calibrated.
    """
    settings = request.settings
    check_names(request.sources, request.data)
    check_files(request.data)
    device = resolve_device(settings.device)
    merged = open_model(MERGED, request.merged)
    require_calibratable(merged)
    dtype = forward_dtype(settings.dtype, merged)
    if opened is not None:
        opened(merged, device, dtype)
    sources = {name: open_model(name, ref) for name, ref in request.sources.items()}
    inputs = [f for model in (merged, *sources.values()) for f in model.checkpoint.folders]
    if request.write:
        check_output(request.out, overwrite=request.overwrite, inputs=inputs)
        require_space(request.out, merged.checkpoint.total_bytes + COMPANION_BYTES)
    for source in sources.values():
        require_same_family(merged, source)
    layers = chosen_layers(merged, settings.layers)
    routers = pair_routers(merged, list(sources.values()), layers)
    begin = time.perf_counter()
    domains, notices = _text(request, merged, sources)
    text_seconds = time.perf_counter() - begin
    return Prepared(
        request=request,
        merged=merged,
        sources=sources,
        layers=layers,
        routers=routers,
        skipped=skipped_routers(merged, layers),
        domains=domains,
        batches=make_batches(domains, batch_tokens=batch_tokens(merged, device)),
        device=device,
        dtype=dtype,
        notices=(*gate_notices(merged, list(sources.values()), routers[0]), *notices),
        key=_key(request, merged, sources, routers, domains, device, dtype),
        text_seconds=text_seconds,
    )


def settings_data(settings: CalibrationSettings) -> dict[str, Any]:
    """The settings as plain data."""
    values = {name: getattr(settings, name) for name in CalibrationSettings.model_fields}
    return {n: str(v) if isinstance(v, LayerSelection) else v for n, v in values.items()}


# --- text ---------------------------------------------------------------------------------------


def _text(
    request: CalibrationRequest, merged: OpenModel, sources: Mapping[str, OpenModel]
) -> tuple[tuple[Domain, ...], list[str]]:
    settings = request.settings
    domains, tokenizer = read_domains(merged, sources, request.data, settings)
    notices = [notice for domain in domains for notice in domain.notices]
    if settings.targets == "source-features":
        for domain in domains:
            source = sources[domain.name]
            what = f"source {source.name!r}"
            require_streamable(merged, source, what=what, hint=MERGED_ALONE)
            notices += check_same_tokens([domain], tokenizer, source, what=what, hint=MERGED_ALONE)
    return domains, notices


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
