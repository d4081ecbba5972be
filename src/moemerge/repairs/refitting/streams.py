"""Stream the merged model and its sources layer by layer, and record what the fits need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from moemerge.checkpoint import Checkpoint
from moemerge.errors import ArchitectureError
from moemerge.families.opened import OpenModel
from moemerge.forward.input_hooks import LinearHook, head_input
from moemerge.forward.old_stream import ModelStream
from moemerge.forward.settings import MemoryEstimate, StreamSettings
from moemerge.forward.spill import Offload
from moemerge.forward.stops import Stop
from moemerge.forward.tokens import real_tokens
from moemerge.repairs.lockstep.experts import ExpertMaps
from moemerge.repairs.refitting.job import RefitJob
from moemerge.repairs.refitting.plan import LayerPlan
from moemerge.repairs.refitting.records import LayerRecorder, Record
from moemerge.repairs.refitting.targets import LayerStructure, LayerView, ResidualWrite, find_writes
from moemerge.runtime.process import give_back_large_buffers
from moemerge.runtime.progress import Progress
from moemerge.runtime.ranks import Ranks
from moemerge.runtime.timing import Stopwatch
from moemerge.text.batches import Batch


@dataclass
class Needs:
    """What must be recorded in the current layer; the first batch reduces it."""

    ranks: Ranks
    plan: LayerPlan | None = None
    structure: LayerStructure | None = None

    def source_input(self, path: str) -> bool:
        plan, structure = self.plan, self.structure
        if plan is None:
            return False
        if path in plan.experts or path in plan.routers:
            return True
        if structure is None:
            return path in plan.linear or path in plan.gates or path in plan.writers
        if path in structure.leaders.values():
            return True
        return path in plan.linear and structure.place(path) is None

    def source_output(self, path: str) -> bool:
        if self.plan is None:
            return False
        if self.structure is None:
            return path in self.plan.writers or path in self.plan.gates
        return any(write.path == path for write in self.structure.writes[:-1])

    def merged_input(self, path: str) -> bool:
        return self.structure is not None and path in self.structure.leaders.values()

    def merged_output(self, path: str) -> bool:
        return self.structure is not None and self.source_output(path)

    def learn(self, batch: Batch, record: Record) -> None:
        """Find the structure of the layer from the first batch."""
        if self.plan is None or self.structure is not None:
            return
        # The factors come from one batch: rank 0's.
        self.structure = self.ranks.broadcast_object(_structure(self.plan, record))
        record.inputs = {p: x for p, x in record.inputs.items() if self.source_input(p)}
        record.outputs = {p: x for p, x in record.outputs.items() if self.source_output(p)}


def _structure(plan: LayerPlan, record: Record) -> LayerStructure:
    writers, gates = set(plan.writers), set(plan.gates)
    outputs = {p: record.outputs[p] for p in record.order if p in writers and p in record.outputs}
    scales = {p: record.outputs[p] for p in record.order if p in gates and p in record.outputs}
    called = frozenset(record.order)
    if record.entered is None or record.left is None:
        return LayerStructure(called=called)
    writes = find_writes(record.entered, record.left, outputs, scales) or ()
    leaders: dict[str, str] = {}
    for write in writes:
        if write.gate is not None:
            leader = _leader(record, write)
            if leader is None:
                return LayerStructure(called=called)
            leaders[write.gate] = leader
    return LayerStructure(tuple(writes), leaders, called)


def _leader(record: Record, write: ResidualWrite) -> str | None:
    """Return a module that reads the gate's input no later than the write."""
    assert write.gate is not None
    read = record.inputs.get(write.gate)
    for path in record.order[: record.order.index(write.path) + 1]:
        if read is not None and record.inputs.get(path) is read:
            return path
    return None


@dataclass
class Runner:
    """One streamed model, and its records of the layer that ran last."""

    stream: ModelStream
    recorder: LayerRecorder
    head: LinearHook | None = None  # if it is refitted
    final: dict[int, Tensor] = field(default_factory=dict)  # the head's inputs, by id of the batch
    stops: Iterator[Stop] | None = None

    @property
    def model(self) -> nn.Module:
        return self.stream.model

    def view(self) -> LayerView:
        return LayerView(self.stream.model, self.recorder.records)

    def keep_final(self, batch: Batch, hidden: Tensor) -> None:
        """Keep the inputs of the head."""
        if self.head is None:
            return
        x = head_input(self.stream.model, self.stream.anatomy.owner, self.head, hidden)
        rows = batch.mask.reshape(-1).nonzero().squeeze(1).to(hidden.device)
        tokens = real_tokens(x, batch, rows)
        assert tokens is not None
        self.final[id(batch)] = tokens

    def run_layer(self) -> None:
        """Run the next layer with all batches (the first call: up to the first layer)."""
        if self.stops is None:
            self.stops = iter(self.stream)
        self.recorder.begin()
        if next(self.stops, None) is None:
            raise ArchitectureError(f"{self.stream.checkpoint.label} has no further layer to run")
        self.stream.give_back()


@dataclass
class RefitStreams:
    """The streamed models: the merged one, and the source of every domain."""

    merged: Runner
    sources: Mapping[str, Runner]
    needs: Needs

    def close(self) -> None:
        for runner in self.runners:
            runner.stream.close()

    @property
    def runners(self) -> Sequence[Runner]:
        return (self.merged, *self.sources.values())

    @property
    def memory(self) -> list[MemoryEstimate]:
        """The memory estimate of each model, the merged one first."""
        return [runner.stream.memory for runner in self.runners]

    @property
    def offload(self) -> Offload:
        return self.merged.stream.memory.offload

    def begin_layer(self, plan: LayerPlan, stop: Stop) -> LayerStructure:
        """Run a layer in the sources, when the merged model has stopped before it."""
        self.needs.plan = plan if plan.pauses else None
        self.needs.structure = None
        for runner in self.sources.values():
            runner.run_layer()
        self.merged.recorder.begin()
        for arrival in stop.arrivals:
            entered = arrival.given[0] if arrival.given else None
            self.merged.recorder.records[id(arrival.batch)] = Record(entered=entered)
        return self.needs.structure or LayerStructure()

    def drop_layers(self) -> None:
        """Release the layers after the last one; only the head remains."""
        for runner in self.runners:
            runner.recorder.begin()
            runner.stream.drop_layer()

    def source_record(self, batch: Batch) -> Record:
        return self.sources[batch.domain].recorder.records[id(batch)]


def build_streams(
    job: RefitJob, merged: Checkpoint, settings: StreamSettings, progress: Progress
) -> RefitStreams:
    """Build skeletons of all models, with recorders.

    `merged` is the merged model's checkpoint, with the layers that a killed run had finished.
    """
    needs = Needs(job.ranks)
    stopwatch = Stopwatch(job.stream.device)
    runners: dict[str, Runner] = {}
    try:
        for name in ("", *job.sources):
            checkpoint = job.sources[name].checkpoint if name else merged
            batches = [b for b in job.batches if name in ("", b.domain)]
            runners[name] = _runner(
                checkpoint, batches, settings, needs, stopwatch, None if name else progress
            )
    except BaseException:
        for runner in runners.values():
            runner.stream.close()
        raise
    if job.stream.device.type == "cpu":
        give_back_large_buffers()  # of Grams and their factors
    return RefitStreams(runners.pop(""), runners, needs)


def _runner(
    checkpoint: Checkpoint,
    batches: Sequence[Batch],
    settings: StreamSettings,
    needs: Needs,
    stopwatch: Stopwatch,
    progress: Progress | None,
) -> Runner:
    """Build one model; `progress` is None for a source."""
    is_merged = progress is not None
    stream = ModelStream(
        checkpoint,
        batches,
        settings,
        on_output=lambda batch, hidden: runner.keep_final(batch, hidden),
        progress=progress,
        stopwatch=stopwatch,
    )
    recorder = LayerRecorder(
        layers=frozenset(stream.anatomy.layers),
        inputs=needs.merged_input if is_merged else needs.source_input,
        outputs=needs.merged_output if is_merged else needs.source_output,
        copies=settings.offload == "disk" or settings.offload == "cpu",
        on_batch=None if is_merged else needs.learn,
    )
    stream.stop_at_layers(inputs=is_merged)
    hooks = [hook.path for hooks in stream.input_hooks.layers for hook in hooks]
    # A router may be a module around its linear map, which then has no input hook.
    routers = [router.path for router in stream.anatomy.routers]
    heard = dict.fromkeys([*stream.anatomy.layers, *hooks, *routers])
    stream.listen(list(heard), recorder.on_calls, outputs=True)
    runner = Runner(stream, recorder)
    return runner


def require_same_shapes(
    streams: RefitStreams, sources: Mapping[str, OpenModel], experts: ExpertMaps
) -> None:
    """Check that every parameter of the layers has a counterpart in every source.

    Experts and routers of a source with more experts were paired by `experts`.
    """
    ours = {name: p.shape for name, p in streams.merged.model.named_parameters()}
    inside = tuple(path + "." for path in streams.merged.stream.anatomy.layers)
    for name, runner in streams.sources.items():
        theirs = {n: p.shape for n, p in runner.model.named_parameters()}
        for parameter in sorted(ours.keys() | theirs.keys()):
            if not parameter.startswith(inside):
                continue
            mine, other = ours.get(parameter), theirs.get(parameter)
            if mine != other and not (name in experts and _same_but_one(mine, other)):
                raise ArchitectureError(
                    f"{parameter} is {_shape(other)} in {sources[name].what}, and {_shape(mine)} "
                    f"in {streams.merged.stream.checkpoint.label}",
                    hint="a source is a model that was merged: same layers, experts and width",
                )


def _same_but_one(mine: torch.Size | None, other: torch.Size | None) -> bool:
    """Return whether shapes differ in one axis: experts, or (1, experts) of a bias."""
    if mine is None or other is None or len(mine) != len(other):
        return False
    return sum(a != b for a, b in zip(mine, other, strict=True)) == 1


def _shape(shape: torch.Size | None) -> str:
    return "missing" if shape is None else str(list(shape))
