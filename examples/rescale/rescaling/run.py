"""Scale routers so that their logits spread as in the sources."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moemerge.families.opened import OpenModel
from moemerge.forward.settings import StreamSettings, batch_tokens, forward_dtype
from moemerge.repairs.lockstep.inputs import read_text
from moemerge.repairs.lockstep.journal import Entry
from moemerge.repairs.lockstep.models import (
    MERGED,
    ChosenRouters,
    PairedRouter,
    require_calibratable,
)
from moemerge.repairs.lockstep.request import RepairRequest, open_models, open_output, request_key
from moemerge.repairs.lockstep.streams import Need, Side, Stops, Visitor, open_lockstep, walk
from moemerge.rescaling.settings import RescaleSettings
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.progress import Progress
from moemerge.runtime.ranks import SINGLE
from moemerge.text.batches import make_batches

RescaleRequest = RepairRequest[RescaleSettings]


def rescale(request: RescaleRequest, progress: Progress) -> list[dict[str, Any]]:
    """Write `request.out` and return one row per router."""
    settings = request.settings
    merged, sources = open_models(request, require_calibratable)
    routers = ChosenRouters.of(merged, list(sources.values()), settings.layers, "rescale")
    device = resolve_device(settings.device)
    dtype = forward_dtype(settings.dtype, merged, device)
    with open_output(request, merged, sources, SINGLE) as output:
        text = read_text(merged, sources, request.data, settings)
        batches = make_batches(text.domains, batch_tokens=batch_tokens(merged, device))
        key = {
            "models": [model.checkpoint.fingerprint() for model in (merged, *sources.values())],
            **request_key(request, text.domains, device, dtype),
        }
        with open_lockstep(
            {MERGED: Side(merged)},  # the sources are not run, only their routers are read
            batches,
            StreamSettings(device, dtype, settings.offload),
            layers=routers.layers,
            need=Need("rescaling", extra=0, hints=["fewer `max_tokens`"]),
            progress=progress,
        ) as lockstep:
            changed = [pair.info.weight for pair in routers.pairs]
            output.begin(key, changed, replace=request.replaces_unfinished)
            visitor = Rescaling(merged, sources, settings, progress)
            walk(lockstep, routers.pairs, visitor, output, SINGLE)
        rows = [entry.row for entry in output.entries]
        output.finish({"rescaling.json": json.dumps(rows, indent=1).encode()})
    return rows


@dataclass(frozen=True)
class Rescaling(Visitor):
    merged: OpenModel
    sources: Mapping[str, OpenModel]
    settings: RescaleSettings
    progress: Progress

    def visit(self, pair: PairedRouter, stops: Stops) -> Entry:
        name = pair.info.weight
        router = self.merged.checkpoint.read(name)  # (experts, d)
        ours = theirs = 0.0
        for source, info in pair.sources.items():
            wanted = self.sources[source].checkpoint.read(info.weight)
            for x in stops.lead.inputs(source):  # (tokens, d) of this source's text
                ours += spread(x, router)
                theirs += spread(x, wanted)
        factor = min(theirs / ours, self.settings.most) if ours else 1.0
        scaled = (router.double() * factor).to(router.dtype)
        return Entry(name, {name: scaled}, {"router": name, "factor": factor})

    def added(self, entry: Entry) -> None:
        self.progress.note(f"{entry.name}: times {entry.row['factor']:.3f}")


def spread(x: Tensor, router: Tensor) -> float:
    """Return the sum over tokens of the logits' standard deviation."""
    logits = x.float() @ router.to(x.device).float().T  # (tokens, experts)
    return float(logits.std(dim=1).sum())
