"""A calibration: what is asked for, and the same once all that can be refused was checked."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from moemerge.architectures.opened import OpenModel
from moemerge.config.calibration import CalibrationSettings
from moemerge.features.settings import StreamSettings, batch_tokens, forward_dtype
from moemerge.lockstep.inputs import (
    JobText,
    base_notices,
    check_same_tokens,
    read_text,
    require_streamable,
    source_weights,
)
from moemerge.lockstep.models import (
    MERGED,
    ChosenRouters,
    StoredRouters,
    gate_notices,
)
from moemerge.lockstep.repairs import RepairRequest, request_key
from moemerge.lockstep.streams import Side
from moemerge.runtime import ranks
from moemerge.runtime.devices import resolve_device
from moemerge.text.batches import Batch, make_batches, own_share
from moemerge.text.domains import Domain

# Tokens of a domain for each feature, below which its figures are taken with a grain of salt: 64
# tokens fit any router of width 64 by heart.
FEW_TOKENS = 2
MERGED_ALONE = (
    '`targets="merged-features"` runs the merged model alone, and of sources reads routers'
)


@dataclass(frozen=True)
class CalibrationRequest(RepairRequest):
    settings: CalibrationSettings


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
        """This rank's share of the text."""
        return own_share(make_batches(self.text.domains, batch_tokens=self._batch_tokens))

    @property
    def _batch_tokens(self) -> int:
        return batch_tokens(self.merged, self.stream.device)

    @property
    def key(self) -> dict[str, Any]:
        """What the result depends on, as plain data: two runs with one key end alike."""
        sources = {
            name: self.stored[name].digest
            + (source.checkpoint.fingerprint() if self.streams_sources else "")
            for name, source in self.sources.items()
        }
        merged = self.stored[MERGED].digest + self.merged.checkpoint.fingerprint()
        return {
            "merged": _sha256(merged),
            "sources": {name: _sha256(text) for name, text in sources.items()},
            "batch_tokens": self._batch_tokens,
            **request_key(self.request, self.text.domains, self.stream.device, self.stream.dtype),
        }


# --- checks, in the order in which they are made ------------------------------------------------


def stream_settings(request: CalibrationRequest, merged: OpenModel) -> StreamSettings:
    settings = request.settings
    device = ranks.own_device(resolve_device(settings.device))
    return StreamSettings(device, forward_dtype(settings.dtype, merged), settings.offload)


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


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
