"""A calibration: what is asked for, and the same once all that can be refused was checked."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from moemerge.architectures.opened import OpenModel, open_model
from moemerge.config.calibration import CalibrationSettings
from moemerge.config.models import ModelRef
from moemerge.features.settings import StreamSettings, batch_tokens, forward_dtype
from moemerge.lockstep.inputs import (
    JobText,
    base_notices,
    check_names,
    check_same_tokens,
    read_text,
    require_streamable,
    settings_data,
    source_weights,
)
from moemerge.lockstep.models import (
    MERGED,
    ChosenRouters,
    StoredRouters,
    gate_notices,
    require_calibratable,
    require_same_family,
)
from moemerge.lockstep.output import Output, PatchedOutput
from moemerge.lockstep.streams import Side
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.dtypes import dtype_name
from moemerge.text.batches import Batch, make_batches
from moemerge.text.domains import Domain
from moemerge.text.rows import TextSource, check_files

# Tokens of a domain for each feature, below which its figures are taken with a grain of salt: 64
# tokens fit any router of width 64 by heart.
FEW_TOKENS = 2
MERGED_ALONE = (
    '`targets="merged-features"` runs the merged model alone, and of sources reads routers'
)
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
    weights: Mapping[str, float] = field(default_factory=dict)  # of sources; 1 where none is given
    overwrite: bool = False
    resume: bool = False
    # The merged folder was made by this very run and goes when it ends: its config says all,
    # and unchanged shards need no copy.
    temporary: bool = False
    # Without it routers are solved for and reported on; nothing is written, not even a journal.
    write: bool = True
    # The data, where they were read with the same settings already.
    text: JobText | None = None


@dataclass(frozen=True)
class CalibrationJob:
    """A calibration that was checked and can be run."""

    request: CalibrationRequest
    merged: OpenModel
    sources: Mapping[str, OpenModel]
    weights: Mapping[str, float]  # of every source, with a mean of 1
    routers: ChosenRouters
    stored: Mapping[str, StoredRouters]  # the same in the merged model and in every source
    text: JobText
    stream: StreamSettings
    notices: tuple[str, ...]

    @property
    def streams_sources(self) -> bool:
        return self.request.settings.targets == "source-features"

    @property
    def sides(self) -> dict[str, Side]:
        """The models that run; the merged one leads, its routers already in memory."""
        sides = {MERGED: Side(self.stored[MERGED].model)}
        if self.streams_sources:
            sides |= {name: Side(source, name) for name, source in self.sources.items()}
        return sides

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        return make_batches(self.text.domains, batch_tokens=self._batch_tokens)

    @property
    def _batch_tokens(self) -> int:
        return batch_tokens(self.merged, self.stream.device)

    @property
    def key(self) -> dict[str, Any]:
        """What the result depends on, as plain data: two runs with one key end alike."""
        settings = settings_data(self.request.settings)
        sources = {
            name: self.stored[name].digest
            + (source.checkpoint.fingerprint() if self.streams_sources else "")
            for name, source in self.sources.items()
        }
        merged = self.stored[MERGED].digest + self.merged.checkpoint.fingerprint()
        return {
            "merged": _sha256(merged),
            "order": list(sources),  # sums run in it, so the last bits depend on it
            "sources": {name: _sha256(text) for name, text in sources.items()},
            "weights": dict(self.weights),
            "data": {domain.name: _digest(domain) for domain in self.text.domains},
            "batch_tokens": self._batch_tokens,
            "settings": {
                **{name: value for name, value in settings.items() if name not in NOT_IN_KEY},
                "device": self.stream.device.type,
                "dtype": dtype_name(self.stream.dtype),
            },
        }


# --- checks, in the order in which they are made ------------------------------------------------


def open_models(request: CalibrationRequest) -> tuple[OpenModel, dict[str, OpenModel]]:
    """The merged model and the sources: named as the data are, of one family, to be calibrated."""
    check_names(request.sources, request.data)
    source_weights(request.weights, request.sources)
    check_files(request.data)
    merged = open_model(MERGED, request.merged)
    require_calibratable(merged)
    sources = {name: open_model(name, ref) for name, ref in request.sources.items()}
    for source in sources.values():
        require_same_family(merged, source)
    return merged, sources


def stream_settings(request: CalibrationRequest, merged: OpenModel) -> StreamSettings:
    settings = request.settings
    device = resolve_device(settings.device)
    return StreamSettings(device, forward_dtype(settings.dtype, merged), settings.offload)


def open_output(
    request: CalibrationRequest, merged: OpenModel, sources: Mapping[str, OpenModel]
) -> Output:
    """OUT in the making, refused here where it must not be."""
    if not request.write:
        return Output()
    return PatchedOutput(
        merged.checkpoint,
        request.out,
        inputs=[folder for model in sources.values() for folder in model.checkpoint.folders],
        overwrite=request.overwrite,
        link=request.temporary,
        in_background=resolve_device(request.settings.device).type != "cpu",
    )


def prepare(
    request: CalibrationRequest,
    merged: OpenModel,
    sources: Mapping[str, OpenModel],
    stream: StreamSettings,
) -> CalibrationJob:
    """Pair the routers, read them and the text; refuses all that does not fit together."""
    settings = request.settings
    routers = ChosenRouters.of(merged, list(sources.values()), settings.layers)
    text = request.text or read_text(merged, sources, request.data, settings)
    notices = base_notices(merged, sources, request.sources)
    notices += [*gate_notices(merged, list(sources.values()), routers.pairs[0]), *text.notices]
    width = merged.checkpoint.tensors[routers.pairs[0].info.weight].shape[1]
    notices += [word for domain in text.domains if (word := few_tokens(domain, width))]
    if settings.targets == "source-features":
        for domain in text.domains:
            other = sources[domain.name]
            hint, what = MERGED_ALONE, f"source {other.name!r}"
            require_streamable(merged, other, what=what, hint=hint)
            notices += check_same_tokens([domain], text.tokenizer, other, what=what, hint=hint)
    stored = {MERGED: StoredRouters(merged, [pair.info for pair in routers.pairs])}
    for name, source in sources.items():
        stored[name] = StoredRouters(source, [pair.sources[name] for pair in routers.pairs])
    weights = source_weights(request.weights, sources)
    return CalibrationJob(
        request, merged, sources, weights, routers, stored, text, stream, tuple(notices)
    )


def few_tokens(domain: Domain, width: int) -> str | None:
    """A word about text that a router of this width can learn by heart."""
    if domain.tokens >= FEW_TOKENS * width:
        return None
    return (
        f"{domain.name}: {domain.tokens} tokens are few for routers of width {width}: what is "
        "measured on them says little about other text; give at least "
        f"{FEW_TOKENS * width}, and diagnose on text of its own"
    )


def _digest(domain: Domain) -> str:
    digest = hashlib.sha256()
    for rows in (domain.rows, domain.holdout):
        digest.update(len(rows).to_bytes(8, "little"))
        for row in rows:
            digest.update(len(row).to_bytes(8, "little"))
            digest.update(row.numpy().tobytes())
    return digest.hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
