"""Change the experts: prune them, compose MoE models of dense ones, add experts to MoE models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from moemerge.api.jobs import files_of, output_for, settings_for, uploaded
from moemerge.api.merging import load_config, merge
from moemerge.api.repairs import run_repair
from moemerge.checkpoint import check_output
from moemerge.checkpoint.output import temporary_sibling
from moemerge.config.dump import config_data
from moemerge.config.faults import parse_settings
from moemerge.config.job_settings import ComposeKeywords, ComposeSettings
from moemerge.config.models import ModelLike
from moemerge.config.repair_settings import (
    CALIBRATION,
    PRUNE,
    REFIT,
    PruneKeywords,
    PruneSettings,
    PruningSettings,
)
from moemerge.config.repairs import StepSettings
from moemerge.config.settings import OutputKeywords, OutputSettings, with_keywords
from moemerge.errors import UsageError
from moemerge.runtime.progress import Progress, Silent
from moemerge.runtime.ranks import alone

if TYPE_CHECKING:
    from moemerge.api.jobs import Files
    from moemerge.conversion.composing.run import ComposeReport
    from moemerge.repairs.lockstep.report import RepairReport
    from moemerge.repairs.pruning.run import PruneReport

# Settings of a repair after pruning that differ from its defaults. Targets are the original's
# routing on its own features: on the pruned model's features, its router and the original's agree.
REPAIRS: Mapping[str, tuple[Any, dict[str, Any]]] = {
    "calibrate": (CALIBRATION, {"targets": "source-features", "objective": "exact"}),
    "refit": (REFIT, {}),
    "gradient": (REFIT, {"solver": "gradient"}),
}
PRUNED_ALONE = "the pruned model before its repair"


class PruneOutKeywords(PruneKeywords, OutputKeywords, total=False):
    """Keywords of `prune`."""


@dataclass(frozen=True)
class PrunedReport:
    """The reports of `prune`: of the pruning, and of the repair if one was requested."""

    pruning: PruneReport
    repair: RepairReport | None = None

    def to_json(self) -> dict[str, Any]:
        document = {PRUNE.key: self.pruning.to_json()}
        if self.repair is not None:
            document[self.repair.repair.key] = self.repair.to_json()
        return document


@with_keywords(PruneOutKeywords, PruneSettings, OutputSettings)
def prune(
    model: ModelLike,
    out: str | Path,
    *,
    data: Mapping[str, Files],
    sources: Mapping[str, ModelLike] | None = None,
    settings: PruningSettings | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[PruneOutKeywords],
) -> PrunedReport:
    """Remove the experts of `model` that contribute least on text; write the model to `out`.

    `data` is text (JSON lines or parquet) under names of your choice. Pass the settings as one
    object, or one by one: `prune(..., keep=0.75, repair="refit")`. A repair fits to the `sources`
    of the text, by name; by default `model` is the source of every text. Then `resume` continues a
    killed run, and `report` is an HTML page to write: a diagnosis before and after.
    """
    output, values = output_for(OutputSettings, keywords, "prune")
    settings = settings_for(PruneSettings, settings, values, "prune")
    after = settings.repair if isinstance(settings, PruneSettings) else "none"
    if after == "none" and (output.resume or output.report is not None):
        given = "resume" if output.resume else "report"
        raise UsageError(
            f"`{given}` belongs to the repair, and none is requested", hint='`repair="refit"`'
        )
    if not data:
        raise UsageError(
            "no text is given, and experts are scored on text", hint="`data={NAME: FILE.jsonl}`"
        )
    from moemerge.repairs.lockstep.request import RepairRequest
    from moemerge.repairs.runners import load_runner

    progress, out = Silent() if progress is None else progress, Path(out)
    request: RepairRequest[Any] = RepairRequest(
        merged=model,
        out=out,
        sources=dict.fromkeys(data, model) if sources is None else sources,
        data={name: files_of(files) for name, files in data.items()},
        settings=settings.narrowed(PruningSettings),
        overwrite=output.overwrite,
    )
    with uploaded(out, output.push_to_hub, progress):
        if after == "none":
            return PrunedReport(load_runner(PRUNE)(request, progress))
        check_output(out, overwrite=output.overwrite)
        if output.report is not None:
            from moemerge.diagnosis.page import page_path

            page_path(output.report, (), overwrite=output.overwrite)
        repair, changes = REPAIRS[after]
        names = (*StepSettings.model_fields, "measure")
        shared = {name: getattr(settings, name) for name in names}
        chosen = parse_settings(repair.settings, {**shared, **changes}, "settings of the repair")
        with temporary_sibling(out) as folder:
            scored = request.settings.model_copy(update={"holdout": chosen.holdout})
            pruned = load_runner(PRUNE)(
                replace(request, out=folder / "pruned", settings=scored), progress
            )
            done = run_repair(
                repair,
                replace(
                    request,
                    merged=folder / "pruned",
                    settings=chosen,
                    resume=output.resume,
                    temporary=True,
                ),
                progress,
                output.report,
                label=PRUNED_ALONE,
            )
    return PrunedReport(replace(pruned, output=str(out)), done)


@with_keywords(ComposeKeywords, ComposeSettings)
def compose(
    config: str | Path | Mapping[str, Any],
    out: str | Path,
    *,
    settings: ComposeSettings | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[ComposeKeywords],
) -> ComposeReport:
    """Compose a MoE of dense models, or add experts to one, into the folder `out`.

    `out` appears complete or not at all. `config` is a YAML file as for mergekit-moe, or its
    content. Pass the settings as one object, or one by one: `compose(..., seed=1)`.
    """
    settings = settings_for(ComposeSettings, settings, keywords, "compose")
    alone("compose")
    from moemerge.conversion.composing.job import load_compose_config
    from moemerge.conversion.composing.run import run_compose

    progress = Silent() if progress is None else progress
    loaded = load_compose_config(config)
    out = Path(out)
    with uploaded(out, settings.push_to_hub, progress):
        if loaded.attention is None:
            return run_compose(loaded, out, settings, progress)
        merge_config = load_config(loaded.attention).merge_alone()
        resolved = config_data(merge_config.config, out)
        loaded = loaded.model_copy(update={"attention": resolved})
        check_output(out, overwrite=settings.overwrite)
        with temporary_sibling(out) as folder:
            merge(merge_config, folder / "attention", device=settings.device, progress=progress)
            return run_compose(loaded, out, settings, progress, donor=folder / "attention")
