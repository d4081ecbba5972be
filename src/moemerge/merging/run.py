"""A merge from config to folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moemerge.checkpoint import (
    CheckpointWriter,
    check_output,
    format_size,
    hub_ids,
    parse_size,
    require_space,
)
from moemerge.config.dump import dump_config
from moemerge.config.load import LoadedConfig
from moemerge.config.options import MergeOptions
from moemerge.config.parameters import StatisticsKind
from moemerge.config.resolve import NormalisedMerge
from moemerge.merging.execute import ExecutionSettings, execute
from moemerge.merging.output import OutputFiles, output_files
from moemerge.merging.plan import InputModel, MergePlan
from moemerge.merging.planner import Planner, open_models
from moemerge.merging.remarks import remark_notices
from moemerge.merging.report import MergeReport, describe_plan
from moemerge.merging.statistics import (
    StatisticsFiles,
    describe_statistics,
    open_statistics,
    pending_bytes,
)
from moemerge.merging.vocabulary import plan_vocabularies
from moemerge.report.card import model_card
from moemerge.report.document import (
    CARD_NAME,
    CONFIG_NAME,
    REPORT_NAME,
    report_bytes,
    report_document,
)
from moemerge.runtime.devices import resolve_device
from moemerge.runtime.progress import Progress
from moemerge.version import __version__

if TYPE_CHECKING:
    from moemerge.statistics.file import Statistics

# Config, tokenizer, report and card beside the weights.
COMPANION_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Prepared:
    """A merge that was planned and checked, and can be run."""

    loaded: LoadedConfig
    plan: MergePlan
    files: OutputFiles
    report: MergeReport
    passing_bytes: int = 0  # of statistics that are still to be computed


def prepare_merge(
    loaded: LoadedConfig, options: MergeOptions, computed: StatisticsFiles | None = None
) -> Prepared:
    """Open the models, make the plan and check it; reads headers, never a tensor.

    `computed` are files of the statistics that the config has text for instead.
    """
    config = loaded.config
    merge = loaded.merge
    models = open_models(merge)
    vocabularies = plan_vocabularies(merge, models, config.tokenizer)
    planner = Planner(merge, models, vocabularies, config.dtype, config.out_dtype)
    output = planner.plan()
    files = output_files(merge, models, vocabularies, output, config.chat_template)
    statistics = _statistics(loaded, models, computed or {})
    plan = MergePlan(
        models=tuple(models.values()),
        tensors=output.tensors,
        blocks=output.blocks,
        accounts=output.accounts,
        input_dtype=planner.input_dtype,
        seed=options.seed,
        notices=(
            *loaded.warnings,
            *output.notices,
            *files.notices,
            *(
                f"statistics of {name}: {n}"
                for (name, _), s in statistics.items()
                for n in s.notices
            ),
        ),
        statistics={(planner.position[name], kind): s for (name, kind), s in statistics.items()},
    )
    report = describe_plan(plan, config.merge_method, _router_words(merge))
    wanted, passing = loaded.statistics, 0
    if wanted is not None:
        report = replace(report, statistics=describe_statistics(wanted, statistics))
        if wanted.data and not computed:
            passing = pending_bytes(wanted, models)
            notice = (
                f"statistics of {', '.join(wanted.data)} are computed first, from their text: "
                f"about {format_size(passing)} of disk beside the output until the merge is done"
            )
            report = replace(report, notices=(*report.notices, notice))
    return Prepared(loaded, plan, files, report, passing)


def _statistics(
    loaded: LoadedConfig, models: Mapping[str, InputModel], computed: StatisticsFiles
) -> dict[tuple[str, StatisticsKind], Statistics]:
    """All that exist already; the others are computed before the merge is run."""
    wanted = loaded.statistics
    if wanted is None:
        return {}
    files = {**wanted.files, **computed}
    needs = {name: kinds for name, kinds in wanted.needs.items() if name in files}
    return open_statistics(needs, files, models)


def check_merge(loaded: LoadedConfig, out: Path | None, options: MergeOptions) -> MergeReport:
    """All checks of a merge, and its report as far as it can be told beforehand."""
    # What the options alone can get wrong comes first: opening a model may mean a long download.
    parse_size(options.out_shard_size)
    resolve_device(options.device)
    if out is not None:
        check_output(out, overwrite=options.overwrite)
    prepared = prepare_merge(loaded, options)
    if out is not None:
        _check_out(prepared, out, options)
    return prepared.report


def run_merge(
    loaded: LoadedConfig,
    out: Path,
    options: MergeOptions,
    progress: Progress,
    computed: StatisticsFiles | None = None,
    *,
    passing: bool = False,
) -> MergeReport:
    """Merge into `out`, which appears whole or not at all.

    `computed` are files of the statistics that the config has text for instead. A `passing` merge
    is read again at once, and so best left in the page cache.
    """
    start = time.perf_counter()
    shard_bytes = parse_size(options.out_shard_size)
    device = resolve_device(options.device)
    check_output(out, overwrite=options.overwrite)
    prepared = prepare_merge(loaded, options, computed)
    plan = prepared.plan
    _check_out(prepared, out, options)
    writer = CheckpointWriter(
        out,
        plan.tensors,
        shard_bytes=shard_bytes,
        overwrite=options.overwrite,
        inputs=_input_folders(plan),
        direct=not passing,
    )
    with writer:
        report = replace(prepared.report, device=str(device), output=str(out))
        _write_companions(writer, prepared, report)  # now, while the disk has nothing else to do
        settings = ExecutionSettings(device=device, allow_nonfinite=options.allow_nonfinite)
        remarks = execute(plan, writer, settings, progress).to_json()
        report = replace(
            report,
            remarks=remarks,
            notices=(*report.notices, *remark_notices(remarks)),
            seconds=time.perf_counter() - start,
        )
        document = report_document(__version__, merge=report.to_json())
        writer.add_bytes(REPORT_NAME, report_bytes(document))
        writer.commit()
    return replace(report, seconds=time.perf_counter() - start)


def _check_out(prepared: Prepared, out: Path, options: MergeOptions) -> None:
    plan = prepared.plan
    check_output(out, overwrite=options.overwrite, inputs=_input_folders(plan))
    require_space(out, plan.bytes_written + COMPANION_BYTES + prepared.passing_bytes)


def _input_folders(plan: MergePlan) -> list[Path]:
    return [folder for model in plan.models for folder in model.checkpoint.folders]


def _write_companions(writer: CheckpointWriter, prepared: Prepared, report: MergeReport) -> None:
    """All files beside the weights but the report, which tells how long they took."""
    for name, path in prepared.files.copied.items():
        writer.add_file(path, name)
    config_text = dump_config(prepared.loaded.config)
    made = {
        **prepared.files.made,
        CONFIG_NAME: config_text.encode(),
        CARD_NAME: merge_card(prepared, report, config_text, __version__).encode(),
    }
    for name, data in made.items():
        writer.add_bytes(name, data)


def merge_card(prepared: Prepared, report: MergeReport, config: str, version: str) -> str:
    """The README of a merged model."""
    inputs = "\n".join(f"- `{m.reference}` ({m.name})" for m in report.models)
    hub = [part for m in report.models for part in hub_ids(m.reference)]
    router = f" Routers: {report.router}." if report.router else ""
    return model_card(
        title=Path(report.output or "merged model").name,
        summary=f"{len(report.models)} models merged with `{report.method}`.{router}",
        hub_models=hub,
        sections=[("Models", inputs)],
        config=config,
        version=version,
    )


def _router_words(merge: NormalisedMerge) -> str | None:
    if merge.router_keep is not None:
        return f"kept from {merge.router_keep}"
    if merge.router_schema is not None:
        return f"merged with {merge.router_schema.name}"
    return None
