"""Jobs about answers of models: kept as calibration text, judged on benchmarks, learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from moemerge.api.jobs import Model, files_of, output_for, settings_for, uploaded
from moemerge.checkpoint.locate import is_local
from moemerge.config.data import DataKeywords, DataSettings
from moemerge.config.evaluation import (
    EvaluationOutKeywords,
    EvaluationOutputSettings,
    EvaluationSettings,
)
from moemerge.config.settings import with_keywords
from moemerge.config.tuning import (
    TuningKeywords,
    TuningOutputKeywords,
    TuningOutputSettings,
    TuningSettings,
)
from moemerge.runtime import ranks
from moemerge.runtime.progress import Progress, Silent, counted
from moemerge.text.rows import check_files

if TYPE_CHECKING:
    from moemerge.api.jobs import Files
    from moemerge.config.load import LoadedConfig
    from moemerge.config.requests import TextRequest
    from moemerge.data import DataReport, DataRequest
    from moemerge.evaluation import EvaluationReport
    from moemerge.tuning import TuningReport


@with_keywords(DataKeywords, DataSettings)
def make_data(
    model: Model,
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
    right, or what else `keep` says; or rows of plain `text`.

    Settings are given as a whole, or one by one: `make_data(..., verify="math", samples=4)`.
    A killed run goes on when it is run again.
    """
    from moemerge.data import DataRequest, run_data

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
    """Refuse recipes of a config that contradict themselves or lack files, before any work."""
    for file, wanted in loaded.texts.items():
        if Path(file).exists():
            continue
        from moemerge.data.job import check_request

        request = _request(wanted)
        check_request(request)
        inputs = (*request.prompts, *request.text, *request.settings.against)
        check_files({file: [source for source in inputs if is_local(str(source))]})


def make_texts(loaded: LoadedConfig, progress: Progress) -> None:
    """Make the text that a config has recipes for. A file that is there is used as it is."""
    for file, wanted in loaded.texts.items():
        if Path(file).exists():
            progress.note(f"{file} is there and used as it is; without it, it is made anew")
            continue
        from moemerge.data import run_data

        report = run_data(_request(wanted), progress)
        progress.note(f"{file}: {counted(report.kept, 'row')} of text, made by {wanted.model}")


def _request(wanted: TextRequest) -> DataRequest:
    from moemerge.data import DataRequest

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
    model: Model,
    out: str | Path,
    *,
    data: Files,
    settings: TuningSettings | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[TuneKeywords],
) -> TuningReport:
    """Let `model` learn the answers of the rows in `data`, and write the result to `out` in the
    layout that the model has.

    Settings are given as a whole, or one by one: `tune(..., preset="paper")`,
    `tune(..., lora=16, epochs=1)`. `resume` goes on from the last state that an interrupted run
    saved. Under torchrun or `accelerate launch` every process must call it; rank 0 writes.
    """
    from moemerge.tuning import TuningRequest, run_tuning

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
    with uploaded(request.out, output.push_to_hub if ranks.leads() else None, progress):
        return run_tuning(request, progress)


@with_keywords(EvaluationOutKeywords, EvaluationSettings, EvaluationOutputSettings)
def evaluate(
    models: Model | Sequence[Model],
    tasks: str | Sequence[str] = (),
    *,
    data: Mapping[str, Files] | None = None,
    settings: EvaluationSettings | None = None,
    progress: Progress | None = None,
    **keywords: Unpack[EvaluationOutKeywords],
) -> EvaluationReport:
    """Let `models` solve `tasks` (names, or YAML files of your own), and compare them problem by
    problem. All answers are kept in the folder `out`, and what is there is not asked again.

    `data` are files of problems by task, in place of those that the task names. `rescore` judges
    the answers in `out` anew, without any model; `models` may then be empty, for all of them.
    Settings are given as a whole, or one by one: `evaluate(..., samples=1, temperature=0)`.
    """
    from moemerge.evaluation import EvaluationRequest, run_evaluation

    output, values = output_for(EvaluationOutputSettings, keywords, "evaluate")
    request = EvaluationRequest(
        models=[models] if isinstance(models, Model) else list(models),
        tasks=[tasks] if isinstance(tasks, str) else list(tasks),
        settings=settings_for(EvaluationSettings, settings, values, "evaluate"),
        output=output,
        data={name: files_of(files) for name, files in (data or {}).items()},
    )
    return run_evaluation(request, Silent() if progress is None else progress)
