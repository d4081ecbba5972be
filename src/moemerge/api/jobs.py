"""Jobs besides merging and repairs: diagnose, swap, extract, collect, generate, tune, evaluate."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, Unpack, get_args

from moemerge.checkpoint.locate import is_local
from moemerge.config.faults import parse_settings
from moemerge.config.fields import LayerSelection, Strict
from moemerge.config.job_settings import (
    CollectingKeywords,
    CollectingSettings,
    DiagnosisKeywords,
    DiagnosisSettings,
    ExpertLayoutName,
    ExtractLoraKeywords,
    ExtractLoraSettings,
)
from moemerge.config.models import ModelLike, ModelRef
from moemerge.config.settings import with_keywords
from moemerge.config.text_settings import DataKeywords, DataSettings
from moemerge.errors import UsageError
from moemerge.families.config_check import check_model_config
from moemerge.families.opened import open_model
from moemerge.lab.evaluation.settings import (
    EvaluationOutKeywords,
    EvaluationOutputSettings,
    EvaluationSettings,
)
from moemerge.lab.tuning.settings import (
    TuningKeywords,
    TuningOutputKeywords,
    TuningOutputSettings,
    TuningSettings,
)
from moemerge.runtime.progress import Progress, Silent, counted
from moemerge.runtime.ranks import leads
from moemerge.text.rows import check_files

if TYPE_CHECKING:
    from moemerge.config.load import LoadedConfig
    from moemerge.config.requests import TextRequest
    from moemerge.conversion.exporting.convert import ConvertReport
    from moemerge.conversion.exporting.extract_lora import ExtractLoraReport
    from moemerge.diagnosis.results import Diagnosis
    from moemerge.diagnosis.swap import SwapReport
    from moemerge.lab.data.job import DataRequest
    from moemerge.lab.data.run import DataReport
    from moemerge.lab.evaluation.report import EvaluationReport
    from moemerge.lab.tuning.output import TuningReport
    from moemerge.merging.extract import ExtractReport
    from moemerge.statistics.collecting.run import CollectReport
    from moemerge.text.rows import TextSource


S = TypeVar("S", bound=Strict)
if TYPE_CHECKING:
    Files = str | Path | Sequence[TextSource]  # files, or rows in memory


def settings_for(model: type[S], settings: S | None, values: Mapping[str, Any], job: str) -> S:
    """Return settings that were passed as one object, or one by one."""
    if settings is None:
        return parse_settings(model, values, f"settings of {job}")
    if values:
        raise UsageError(
            f"{job}: settings were given as a whole and also one by one: {', '.join(values)}",
            hint="give either `settings` or single values",
        )
    return settings


def output_for(model: type[S], keywords: Mapping[str, Any], job: str) -> tuple[S, dict[str, Any]]:
    """Split keywords into the settings of the output and the others."""
    values = {n: v for n, v in keywords.items() if n in model.model_fields}
    others = {n: v for n, v in keywords.items() if n not in values}
    return parse_settings(model, values, f"settings of {job}"), others


def files_of(files: Files) -> tuple[TextSource, ...]:
    """Return one file as a tuple, and several unchanged."""
    return (files,) if isinstance(files, str | Path) else tuple(files)


@contextmanager
def uploaded(out: Path, repo: str | None, progress: Progress) -> Iterator[None]:
    """Upload the content of `out` after the block, and check the permission before it."""
    if repo is None:
        yield
        return
    from moemerge.checkpoint.hub import check_upload, upload

    check_upload(repo)
    yield
    progress.note(f"uploading {out} to {repo}")
    progress.note(f"uploaded: {upload(out, repo)}")


@with_keywords(DiagnosisKeywords, DiagnosisSettings)
def diagnose(
    model: ModelLike,
    *,
    sources: Mapping[str, ModelLike],
    data: Mapping[str, Files],
    against: Sequence[ModelLike] = (),
    check: Mapping[str, Files] | None = None,
    experts: Mapping[str, str | Path] | None = None,
    settings: DiagnosisSettings | None = None,
    report: str | Path | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **keywords: Unpack[DiagnosisKeywords],
) -> Diagnosis:
    """Measure how a merge changed the routing of `model`. Any tool may have merged it.

    `sources` are the merged models and `data` text of each (best held out from any calibration),
    under the same names. Text under any other name is measured against the `base`. Models in
    `against` are measured, too. `check` is text on which only the loss is measured; under the name
    of a source, that source is measured as well. `experts` are files with the kept experts of
    sources that have more experts than `model`, as for `calibrate`. Pass the settings as one
    object, or one by one: `diagnose(..., swaps=True, max_tokens=20_000)`. `report` is an HTML page
    to write, and `overwrite` allows it to replace an earlier one.
    """
    from moemerge.diagnosis.job import DiagnosisRequest
    from moemerge.diagnosis.page import page_path
    from moemerge.diagnosis.run import run_diagnosis
    from moemerge.report.page import write_page

    request = DiagnosisRequest(
        model=model,
        sources=sources,
        data={name: files_of(files) for name, files in data.items()},
        against=(against,) if isinstance(against, str | Path | ModelRef) else tuple(against),
        settings=settings_for(DiagnosisSettings, settings, keywords, "diagnose"),
        check={name: files_of(files) for name, files in (check or {}).items()},
        experts=experts or {},
    )
    page = None
    if report is not None and leads():
        texts = chain(*request.data.values(), *request.check.values())
        inputs = (model, *sources.values(), *request.against, *texts)
        page = page_path(report, inputs, overwrite=overwrite)
    diagnosis = run_diagnosis(request, Silent() if progress is None else progress)
    if page is not None:
        write_page(diagnosis.to_json(), page)
    return diagnosis


def swap_routers(
    model: ModelLike,
    donor: ModelLike,
    out: str | Path,
    *,
    layers: object = "all",
    link: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> SwapReport:
    """Write `model` with the routers of `donor` (of the same family) to `out`.

    `link` makes hard links of the shards without routers, if the file system allows it.
    """
    from moemerge.diagnosis.swap import swap_routers as swap

    check_model_config(open_model(str(model), model))
    return swap(
        model,
        donor,
        Path(out),
        layers=LayerSelection.parse(layers),
        link=link,
        overwrite=overwrite,
        progress=Silent() if progress is None else progress,
    )


def extract(
    shared: ModelLike,
    task: str,
    out: str | Path,
    *,
    base: ModelLike | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExtractReport:
    """Write one model of a merge that kept them (`tasks:` in its config) to `out`.

    `task` is the name of that model. `base` is the base model's new path if it has moved since.
    """
    from moemerge.merging.extract import extract_model

    progress = Silent() if progress is None else progress
    check_model_config(open_model(str(shared), shared))
    return extract_model(shared, task, Path(out), base=base, overwrite=overwrite, progress=progress)


@with_keywords(ExtractLoraKeywords, ExtractLoraSettings)
def extract_lora(
    model: ModelLike,
    base: ModelLike,
    out: str | Path,
    *,
    settings: ExtractLoraSettings | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **keywords: Unpack[ExtractLoraKeywords],
) -> ExtractLoraReport:
    """Write the difference of `model` and `base` as a LoRA adapter in PEFT's format to `out`.

    Pass the settings as one object, or one by one: `extract_lora(..., rank=32)`.
    """
    settings = settings_for(ExtractLoraSettings, settings, keywords, "extract_lora")
    from moemerge.conversion.exporting.extract_lora import extract_lora as run

    for one in (model, base):
        check_model_config(open_model(str(one), one))
    progress = Silent() if progress is None else progress
    return run(model, base, Path(out), settings, overwrite=overwrite, progress=progress)


def convert(
    model: ModelLike,
    out: str | Path,
    *,
    layout: ExpertLayoutName,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write `model` with its experts in another layout to `out`, bit for bit.

    `per-expert` is the layout in which most families are published, `fused` that of transformers'
    models in memory.
    """
    from moemerge.conversion.exporting.convert import convert as run

    if layout not in get_args(ExpertLayoutName):
        known = ", ".join(get_args(ExpertLayoutName))
        raise UsageError(f"unknown layout {layout!r}", hint=f"known: {known}")
    check_model_config(open_model(str(model), model))
    progress = Silent() if progress is None else progress
    return run(model, Path(out), layout, overwrite=overwrite, progress=progress)


@with_keywords(CollectingKeywords, CollectingSettings)
def collect_statistics(
    model: ModelLike,
    out: str | Path,
    *,
    data: Files,
    settings: CollectingSettings | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **keywords: Unpack[CollectingKeywords],
) -> CollectReport:
    """Collect Gram matrices or Fisher values of `model` over its text `data` into the file `out`.

    Pass the settings as one object, or one by one: `collect_statistics(..., kind="fisher")`.
    """
    from moemerge.statistics.collecting.job import CollectRequest
    from moemerge.statistics.collecting.run import run_collect

    request = CollectRequest(
        model=model,
        out=Path(out),
        data=files_of(data),
        settings=settings_for(CollectingSettings, settings, keywords, "collect_statistics"),
        overwrite=overwrite,
    )
    return run_collect(request, Silent() if progress is None else progress)


# --- text and answers ----------------------------------------------------------------------------


@with_keywords(DataKeywords, DataSettings)
def make_data(
    model: ModelLike,
    out: str | Path,
    *,
    prompts: Files = (),
    text: Files = (),
    settings: DataSettings | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **keywords: Unpack[DataKeywords],
) -> DataReport:
    """Write calibration text to the file `out`: answers of `model` to `prompts` that were judged
    correct, what else `keep` selects, or rows of plain `text`.

    Pass the settings as one object, or one by one: `make_data(..., verify="math", samples=4)`. A
    killed run continues when it is repeated.
    """
    from moemerge.lab.data.job import DataRequest
    from moemerge.lab.data.run import run_data

    request = DataRequest(
        model=model,
        out=Path(out),
        prompts=files_of(prompts),
        text=files_of(text),
        settings=settings_for(DataSettings, settings, keywords, "make_data"),
        overwrite=overwrite,
    )
    return run_data(request, Silent() if progress is None else progress)


def check_recipes(loaded: LoadedConfig) -> None:
    """Refuse contradictory recipes, and recipes with missing files, before any work."""
    for file, wanted in loaded.texts.items():
        if os.path.exists(file):
            continue
        from moemerge.lab.data.job import check_request

        request = _data_request(wanted)
        check_request(request)
        inputs = (*request.prompts, *request.text, *request.settings.against)
        check_files({file: [source for source in inputs if is_local(str(source))]})


def make_texts(loaded: LoadedConfig, progress: Progress) -> None:
    """Generate the text files that a config requests. An existing file is used unchanged."""
    for file, wanted in loaded.texts.items():
        if os.path.exists(file):
            progress.note(f"{file} is there and used as it is; without it, it is made anew")
            continue
        from moemerge.lab.data.run import run_data

        report = run_data(_data_request(wanted), progress)
        progress.note(f"{file}: {counted(report.kept, 'row')} of text, made by {wanted.model}")


def _data_request(wanted: TextRequest) -> DataRequest:
    from moemerge.lab.data.job import DataRequest

    recipe = wanted.recipe
    return DataRequest(
        model=wanted.model,
        out=Path(recipe.file),
        prompts=recipe.prompts,
        text=recipe.text,
        settings=recipe.settings,
    )


class TuneKeywords(TuningKeywords, TuningOutputKeywords, total=False):
    """Keywords of `tune`."""


@with_keywords(TuneKeywords, TuningSettings, TuningOutputSettings)
def tune(
    model: ModelLike,
    out: str | Path,
    *,
    data: Files,
    settings: TuningSettings | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[TuneKeywords],
) -> TuningReport:
    """Fine-tune `model` on the answers of the rows in `data`, and write it to `out` in its layout.

    Pass the settings as one object, or one by one: `tune(..., preset="paper")`, `tune(..., lora=16,
    epochs=1)`. `resume` continues from the last saved state. Under torchrun or `accelerate launch`
    every process must call this function; rank 0 writes.
    """
    from moemerge.lab.tuning.job import TuningRequest
    from moemerge.lab.tuning.run import run_tuning

    output, values = output_for(TuningOutputSettings, keywords, "tune")
    request = TuningRequest(
        model=model,
        out=Path(out),
        data=files_of(data),
        settings=settings_for(TuningSettings, settings, values, "tune"),
        overwrite=output.overwrite,
        resume=output.resume,
    )
    progress = Silent() if progress is None else progress
    with uploaded(request.out, output.push_to_hub if leads() else None, progress):
        return run_tuning(request, progress)


@with_keywords(EvaluationOutKeywords, EvaluationSettings, EvaluationOutputSettings)
def evaluate(
    models: ModelLike | Sequence[ModelLike],
    tasks: str | Sequence[str] = (),
    *,
    data: Mapping[str, Files] | None = None,
    settings: EvaluationSettings | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[EvaluationOutKeywords],
) -> EvaluationReport:
    """Let `models` solve `tasks` (names or YAML files), and compare them problem by problem.

    All answers are kept in the folder `out`, and existing ones are not generated again. `data` are
    files of problems by task, which replace those of the task. `rescore` judges the answers in
    `out` again, without any model; `models` may then be empty, for all of them. Pass the settings
    as one object, or one by one: `evaluate(..., samples=1, temperature=0)`.
    """
    from moemerge.lab.evaluation.job import EvaluationRequest
    from moemerge.lab.evaluation.run import run_evaluation

    output, values = output_for(EvaluationOutputSettings, keywords, "evaluate")
    request = EvaluationRequest(
        models=[models] if isinstance(models, ModelLike) else list(models),
        tasks=[tasks] if isinstance(tasks, str) else list(tasks),
        settings=settings_for(EvaluationSettings, settings, values, "evaluate"),
        output=output,
        data={name: files_of(files) for name, files in (data or {}).items()},
    )
    return run_evaluation(request, Silent() if progress is None else progress)
