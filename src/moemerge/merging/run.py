"""Run a merge from config to output folder: `plan_merge` checks everything, `run_merge` merges."""

from __future__ import annotations

import json
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moemerge.checkpoint import (
    CheckpointWriter,
    check_output,
    format_size,
    hub_ids,
    parse_size,
    require_space,
)
from moemerge.checkpoint.model_card import (
    CARD_NAME,
    CONFIG_NAME,
    REPORT_NAME,
    in_code,
    in_markdown,
    model_card,
    report_file,
)
from moemerge.checkpoint.reader import as_ref
from moemerge.checkpoint.requantise import QuantisingWriter, static_scale_notices
from moemerge.config.checks import filter_faults
from moemerge.config.coefficients import Coefficients
from moemerge.config.dump import dump_config
from moemerge.config.load import LoadedConfig
from moemerge.config.resolve import NormalisedMerge
from moemerge.config.settings import MergeSettings, as_flags
from moemerge.errors import ArchitectureError, UsageError
from moemerge.families.opened import OpenModel, check_configs, config_difference
from moemerge.families.rules import CONFIG_HINT
from moemerge.merging.execute import DEFAULT_MEMORY_BUDGET, execute
from moemerge.merging.kept import ModelKeeper, kept_tensors
from moemerge.merging.output import OutputFiles, merge_output_files
from moemerge.merging.plan import MergeBlock, MergePlan, distinct
from moemerge.merging.planner import Planner, open_inputs
from moemerge.merging.report import Findings, MergeReport, ModelAccount, account_for_inputs
from moemerge.merging.statistics import (
    StatisticsFiles,
    describe_statistics,
    open_statistics,
    pending_bytes,
)
from moemerge.merging.tokenizer.embeddings import plan_vocabularies
from moemerge.runtime.devices import check_device, host_memory, resolve_device
from moemerge.runtime.process import disk_bytes_read, paused_collector
from moemerge.runtime.progress import Progress, counted
from moemerge.runtime.ranks import SINGLE, Ranks, alone, neighbours, own_device
from moemerge.text.rows import check_text

logger = logging.getLogger(__name__)
# Space for config, tokenizer, report and card next to the weights.
OTHER_FILES_BYTES = 64 * 2**20


@dataclass(frozen=True)
class MergeJob:
    """A planned and checked merge, ready to run."""

    loaded: LoadedConfig
    settings: MergeSettings
    plan: MergePlan
    files: OutputFiles
    started: float  # start time by `time.perf_counter`
    read_before: int | None  # `disk_bytes_read` at the start
    pending_bytes: int = 0  # size of statistics that must still be computed
    statistics_seconds: float | None = None  # time to compute them

    def with_statistics(self, files: StatisticsFiles) -> MergeJob:
        """Return the job with the computed statistics `files`."""
        request = self.loaded.statistics
        assert request is not None  # otherwise there is nothing to compute
        needs = {name: kinds for name, kinds in request.needs.items() if name in files}
        opened = {**self.plan.statistics, **open_statistics(needs, files, self.plan.models)}
        order = [(name, kind) for name, kinds in request.needs.items() for kind in kinds]
        statistics = {key: opened[key] for key in order if key in opened}
        return replace(
            self,
            plan=replace(self.plan, statistics=statistics),
            pending_bytes=0,
            statistics_seconds=time.perf_counter() - self.started if self.pending_bytes else None,
        )

    @property
    def report(self) -> MergeReport:
        """Return the report of the planned merge."""
        plan, request = self.plan, self.loaded.statistics
        notices = [
            f"statistics of {name}: {notice}"
            for (name, _), statistics in plan.statistics.items()
            for notice in statistics.notices
        ]
        if self.pending_bytes and request is not None:
            notices.append(
                f"statistics of {', '.join(request.data)} are computed first, from their text: "
                f"about {format_size(self.pending_bytes)} of disk next to the output until the "
                "merge is done"
            )
        merge = self.loaded.merge
        return MergeReport(
            method=merge.schema.name,
            router=_describe_router(merge),
            models=account_for_inputs(plan, merge.bases, self.loaded.shown),
            output_tensors=len(plan.tensors),
            output_bytes=plan.bytes_written,
            output_parameters=sum(t.nbytes // t.dtype.itemsize for t in plan.tensors),
            dtypes=tuple(sorted({t.stored_as for t in plan.tensors})),
            bytes_read=plan.bytes_read,
            peak_block_bytes=plan.peak_block_bytes,
            seed=plan.seed,
            wraps=tuple(reader.schema.name for reader in merge.wraps),
            coefficients=_describe_coefficients(self.loaded.coefficients),
            statistics={} if request is None else describe_statistics(request, plan.statistics),
            statistics_seconds=self.statistics_seconds,
            settings=_changed_settings(self.settings),
            notices=tuple(map(self.loaded.shown, (*plan.notices, *notices))),
        )

    @property
    def kept_bytes(self) -> int:
        """Return the size of what `tasks:` keeps of all models."""
        kept = self.loaded.config.tasks
        if kept is None:
            return 0
        inputs = {s.model for block in self.plan.blocks for m in block.planned for s in m.inputs}
        return len(inputs) * sum(info.nbytes for info in kept_tensors(self.plan, kept))


@paused_collector()
def plan_merge(loaded: LoadedConfig, settings: MergeSettings, out: Path | None = None) -> MergeJob:
    """Open the models, make the plan and check it. Reads headers only, never a tensor."""
    started, read_before = time.perf_counter(), disk_bytes_read()
    # Check the settings first: opening a model may mean a long download.
    parse_size(settings.out_shard_size)
    memory = memory_budget(settings)
    check_device(settings.device)
    if out is not None:
        check_output(out, overwrite=settings.overwrite)
    config, merge = loaded.config, loaded.merge
    seed = settings.seed if settings.seed is not None else config.seed or 0
    models = open_inputs(merge)
    donor = models[merge.name_of(merge.donor)]
    check_configs(list(models.values()))
    vocabularies = plan_vocabularies(merge, models, config.tokenizer)
    requantise = settings.requantize == "same"
    if requantise:
        require_requantisable(merge, donor)
    if config.tasks is not None:
        _require_keepable(requantise)
    planner = Planner(loaded, models, vocabularies, requantise=requantise)
    output = planner.plan()
    readers = [merge.reader, *merge.wraps]
    readers += [merge.router_reader] if merge.router_reader is not None else []
    ineffective = list(filter_faults(loaded.filters, readers, planner.names))
    files = merge_output_files(
        donor, vocabularies, output, config.chat_template, requantise=requantise
    )
    doubts = _config_doubts(donor, output, files, lenient=settings.lenient)
    checkpoints = [model.checkpoint for model in models.values()]
    plan = replace(
        output,
        seed=seed,
        notices=(
            *loaded.warnings,
            *(notice for checkpoint in checkpoints for notice in checkpoint.notices),
            *loaded.document.judge(ineffective),
            *output.notices,
            *files.notices,
            *doubts,
            *_memory_notices(output.blocks, memory),
            *(static_scale_notices(donor.checkpoint, checkpoints) if requantise else ()),
        ),
    )
    job = MergeJob(loaded, settings, plan, files, started, read_before)
    if loaded.statistics is not None:
        data = loaded.existing(loaded.statistics.data)
        check_text(data, columns=loaded.statistics.settings.map)
        job = job.with_statistics(loaded.statistics.files)
        pending = pending_bytes(loaded.statistics, models)
        job = replace(job, pending_bytes=pending)
    if out is not None:
        check_output(out, overwrite=settings.overwrite, inputs=plan.input_folders)
        require_space(
            out, plan.bytes_written + OTHER_FILES_BYTES + job.pending_bytes + job.kept_bytes
        )
    seconds = time.perf_counter() - started
    methods = sorted({m.method.schema.name for b in distinct(plan.blocks) for m in b.planned})
    what = f"{len(plan.tensors)} tensors in {len(plan.blocks)} blocks by {', '.join(methods)}"
    logger.info("planned %s, %.2f s", what, seconds)
    return job


def memory_budget(settings: MergeSettings) -> int:
    """Return the memory for all blocks in work: the setting, or a quarter of the machine's."""
    if settings.memory is not None:
        return parse_size(settings.memory)
    return max(DEFAULT_MEMORY_BUDGET, host_memory() // (4 * neighbours()))


def _memory_notices(blocks: Sequence[MergeBlock], memory: int) -> list[str]:
    """Warn of a block that takes more memory than all blocks together should."""
    merged = (block for block in distinct(blocks) if block.planned)
    largest = max(merged, key=lambda block: block.working_bytes, default=None)
    if largest is None or largest.working_bytes <= memory:
        return []
    return [
        f"warning: {largest.tensor} is merged at once by {largest.planned[0].method.name!r}, which "
        f"takes about {format_size(largest.working_bytes)} of memory; `memory` is "
        f"{format_size(memory)}"
    ]


def _config_doubts(
    donor: OpenModel, output: MergePlan, files: OutputFiles, *, lenient: bool
) -> list[str]:
    """Compare OUT's config.json with the inputs'; return a warning if a lenient merge differs."""
    difference = config_difference(json.loads(files.made["config.json"]), output.models.values())
    if difference is None:
        return []
    fault = f"{donor.checkpoint.path / 'config.json'}: {difference}"
    if not lenient:
        raise ArchitectureError(fault, hint=f"{CONFIG_HINT}; `lenient=True` merges it anyway")
    return [f"warning: {fault}"]


def run_merge(
    job: MergeJob,
    out: Path,
    progress: Progress,
    ranks: Ranks,
) -> MergeReport:
    """Merge into `out`, which appears complete or not at all.

    Under torchrun each process merges a part of the tensors.
    """
    device = own_device(resolve_device(job.settings.device))
    with _open_writer(job.plan, out, job.settings, ranks) as writer:
        models = account_for_inputs(
            job.plan,
            job.loaded.merge.bases,
            lambda label: job.loaded.shown(str(as_ref(label).as_named_in(out))),
        )
        report = replace(job.report, models=models, device=str(device), output=str(out))
        if ranks.leads:  # before the weights, while the disk is idle
            _write_companions(writer, job, report)
        plan = _own_part(job.plan, ranks)
        checkpoints = [model.checkpoint for model in plan.models.values()]
        target = QuantisingWriter(writer, plan.quantised_tensors(), checkpoints)
        with keeping(job, writer.folder) as keeper:
            findings = execute(
                plan,
                target,
                ranks.progress(progress),
                device=device,
                memory_budget=memory_budget(job.settings),
                allow_nonfinite=job.settings.allow_nonfinite,
                keeper=keeper,
            )
            tasks = {} if keeper is None else keeper.commit()
        if ranks.count > 1:
            _gather(writer, findings, target, ranks)
        report = replace(
            report,
            remarks=findings.remarks_json(),
            tasks=tasks,
            requantised=target.errors.to_json(),
            disk_bytes_read=ranks.disk_bytes_since(job.read_before),
            notices=(*report.notices, *findings.notices()),
            seconds=time.perf_counter() - job.started,
        )
        if ranks.leads:
            writer.add_bytes(REPORT_NAME, report_file(merge=report.to_json()))
            for model in job.plan.models.values():
                model.checkpoint.require_unchanged()
            writer.commit()
    report = replace(report, seconds=time.perf_counter() - job.started)
    return ranks.broadcast_object(report)


# --- several processes: each merges some tensors into the folder that rank 0 created --------------


def _own_part(plan: MergePlan, ranks: Ranks) -> MergePlan:
    """Return the plan of this rank's tensors. All ranks get about the same amount of work."""
    if ranks.count == 1:
        return plan
    work: dict[str, int] = defaultdict(int)
    for block in plan.blocks:
        work[block.tensor] += block.working_bytes
    names = list(work)
    [places] = ranks.share([list(work.values())])
    own = {names[place] for place in places}
    return replace(
        plan,
        tensors=tuple(info for info in plan.tensors if info.name in own),
        blocks=tuple(block for block in plan.blocks if block.tensor in own),
    )


def _open_writer(
    plan: MergePlan, out: Path, settings: MergeSettings, ranks: Ranks
) -> CheckpointWriter:
    """Return the writer of OUT. Rank 0 creates the hidden folder, the others write into it."""

    def writer(folder: Path | None) -> CheckpointWriter:
        return CheckpointWriter(
            out,
            [part for info in plan.tensors for part in info.parts],
            shard_bytes=parse_size(settings.out_shard_size),
            overwrite=settings.overwrite,
            inputs=plan.input_folders,
            folder=folder,
        )

    if not ranks.leads:
        return writer(Path(ranks.broadcast_object("")))
    made = writer(None)
    try:
        ranks.broadcast_object(str(made.folder))
    except BaseException:
        made.abort()
        raise
    return made


def _gather(
    writer: CheckpointWriter, findings: Findings, target: QuantisingWriter, ranks: Ranks
) -> None:
    """Collect on rank 0 what the other ranks wrote and found."""
    written = () if ranks.leads else writer.hand_over()
    own = (written, findings.units, findings.nonfinite, target.errors.sums)
    for names, units, nonfinite, rounding in ranks.gather(own)[1:]:
        if ranks.leads:
            writer.take_over(names)
            for remark, facts in units.items():
                findings.units[remark].update(facts)
            for whose, tensors in nonfinite.items():
                findings.nonfinite[whose] |= tensors
            target.errors.add(rounding)


def write_placeholder(job: MergeJob, out: Path) -> None:
    """Write the merged model with all files, but without its weights: sparse files of zeros.

    Later stages of a config are planned with it.
    """
    with _open_writer(job.plan, out, job.settings, SINGLE) as writer:
        _write_companions(writer, job, job.report)
        writer.take_over(list(writer.missing()))
        writer.commit()


def _require_keepable(requantise: bool) -> None:
    """Refuse `tasks:` if the merged weights are requantised or computed by several processes."""
    alone("merge (a config with `tasks:`)")
    if requantise:
        raise UsageError(
            '`requantize="same"` rounds what `tasks:` of the config refer to',
            hint="leave one of them out",
        )


def keeping(job: MergeJob, folder: Path) -> AbstractContextManager[ModelKeeper | None]:
    """Return a `ModelKeeper` if the config has `tasks:`, else a context manager of None."""
    kept, base = job.loaded.config.tasks, job.loaded.merge.base_model
    if kept is None or base is None:
        return nullcontext()
    model = job.plan.models[job.loaded.merge.name_of(base)]
    return ModelKeeper(job.plan, kept, model, base, folder)


def _write_companions(writer: CheckpointWriter, job: MergeJob, report: MergeReport) -> None:
    """Write all files except the weights and the report, which contains the run time."""
    for name, path in job.files.copied.items():
        writer.add_file(path, name)
    config = job.loaded.config.model_copy(update={"seed": job.plan.seed})
    texts = [dump_config(config, writer.out)]
    if job.loaded.earlier is not None:
        earlier = job.loaded.earlier.configs
        before = [f"name: {name}\n{dump_config(one, writer.out)}" for name, one in earlier]
        texts = [*before, *texts]
    config_text = job.loaded.shown("---\n".join(texts))
    made = {
        **job.files.made,
        CONFIG_NAME: config_text.encode(),
        CARD_NAME: merge_card(report, config_text).encode(),
    }
    for name, data in made.items():
        writer.add_bytes(name, data)


def _changed_settings(settings: MergeSettings) -> dict[str, Any]:
    """Return non-default settings that change the result and are not part of the config."""
    fields = MergeSettings.model_fields
    names = ("requantize", "allow_nonfinite")
    return {n: v for n in names if (v := getattr(settings, n)) != fields[n].default}


def _card_line(model: ModelAccount) -> str:
    base = ", the base" if model.base else ""
    return f"- `{in_code(model.reference)}` ({in_markdown(model.name)}{base})"


def merge_card(report: MergeReport, config: str) -> str:
    """Return the README of a merged model."""
    inputs = "\n".join(_card_line(m) for m in report.models)
    router = f" Routers: {report.router}." if report.router else ""
    models = counted(sum(not m.base for m in report.models), "model")
    wraps = f" within {', '.join(f'`{name}`' for name in report.wraps)}" if report.wraps else ""
    return model_card(
        title=Path(report.output or "merged model").name,
        summary=f"{models} merged with `{report.method}`{wraps}.{router}",
        hub_models=[part for m in report.models for part in hub_ids(m.reference)],
        sections=[("Models", inputs)],
        config=config,
        flags=as_flags(report.settings),
    )


def require_requantisable(merge: NormalisedMerge, donor: OpenModel) -> None:
    """Refuse requantisation if the config's model is not quantised or layers are moved."""
    if donor.checkpoint.quantisation is None:
        raise UsageError(
            f'`requantize="same"`: {donor.label}, whose config the result takes, is not quantised',
            hint="leave it out, or name a quantised model as base_model",
        )
    if not merge.whole:
        raise UsageError(
            '`requantize="same"` cannot move layers: the config names those that stay in floats',
            hint="merge the slices into floats, and quantise the result with the format's tool",
        )


def _describe_coefficients(coefficients: Coefficients | None) -> dict[str, Any]:
    if coefficients is None:
        return {}
    return {"file": coefficients.document.where, "made_by": dict(coefficients.made_by)}


def _describe_router(merge: NormalisedMerge) -> str | None:
    if merge.router_keep is not None:
        return f"kept from {merge.router_keep}"
    if merge.router_schema is not None:
        return f"merged with {merge.router_schema.name}"
    return None
