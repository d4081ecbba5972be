"""From a request to a file of statistics."""

from __future__ import annotations

import time

from moemerge.collecting.fishers import collect_fishers, predicting
from moemerge.collecting.grams import GramCollector
from moemerge.collecting.prepare import CollectRequest, Prepared, prepare
from moemerge.collecting.report import CollectReport
from moemerge.features.settings import StreamSettings
from moemerge.features.stream import ModelStream
from moemerge.features.units import UnitMap
from moemerge.runtime.progress import Progress
from moemerge.statistics import Statistics, StatisticsWriter


def run_collect(request: CollectRequest, progress: Progress) -> CollectReport:
    """Gather what is asked for; the file appears whole or not at all."""
    begin = time.perf_counter()
    prepared = prepare(request)
    with StatisticsWriter(
        request.out,
        kind=request.settings.kind,
        provenance=prepared.provenance,
        keys=prepared.keys,
        overwrite=request.overwrite,
        device=prepared.device,
    ) as writer:
        if request.settings.kind == "gram":
            notices, unvisited = _grams(prepared, writer, progress)
        else:
            notices, unvisited = collect_fishers(prepared, writer, progress)
        writer.commit(sequences=predicting(prepared), notices=notices)
    with Statistics.open(request.out) as written:
        return CollectReport(
            kind=request.settings.kind,
            output=str(request.out),
            provenance=prepared.provenance,
            units=len(written.units),
            units_without=len(prepared.keys) - len(written.units),
            unvisited_experts=tuple(unvisited),
            nbytes=request.out.stat().st_size,
            seconds=time.perf_counter() - begin,
            notices=tuple(notices),
        )


def _grams(
    prepared: Prepared, writer: StatisticsWriter, progress: Progress
) -> tuple[list[str], list[str]]:
    collector = GramCollector(writer)
    with ModelStream(
        prepared.model.checkpoint,
        prepared.batches,
        StreamSettings(prepared.device, prepared.dtype, offload=prepared.request.settings.offload),
        on_output=collector.on_output,
        progress=progress,
    ) as stream:
        units = UnitMap(prepared.model.checkpoint, prepared.model.architecture, stream.names)
        units.require_experts(stream.taps)
        collector.attach(stream, units)
        for stop in stream:
            if stop.layer > 0:
                collector.on_layer(stop.layer - 1)
        collector.finish()
    return collector.notices, collector.unvisited
