"""The laboratory's verbs as functions: generate text, tune, evaluate, sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moemerge.api import Files, files_of, uploaded
from moemerge.checkpoint.locate import is_local
from moemerge.config.models import ModelLike
from moemerge.config.settings import output_for, settings_for, with_keywords
from moemerge.config.text_settings import DataSettings, GenerationSettings
from moemerge.errors import MoeMergeError
from moemerge.lab.settings import EvaluationOutputSettings, EvaluationSettings
from moemerge.lab.tuning.settings import TuningOutputSettings, TuningSettings
from moemerge.runtime.progress import Progress, Silent
from moemerge.runtime.ranks import leads
from moemerge.text.rows import check_files

if TYPE_CHECKING:
    from moemerge.lab.data.run import DataReport
    from moemerge.lab.scores import EvaluationReport
    from moemerge.lab.tuning.output import TuningReport


@with_keywords(DataSettings)
def make_data(
    model: ModelLike,
    out: str | Path,
    *,
    prompts: Files = (),
    text: Files = (),
    settings: DataSettings | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    **keywords: Any,
) -> DataReport | None:
    """Write calibration text to the file `out`: answers of `model` to `prompts` that were judged
    correct, what else `keep` selects, or rows of plain `text`.

    A killed run continues when it is repeated. `dry_run` only checks the arguments and local files,
    and returns None.
    """
    from moemerge.lab.data.job import DataRequest, check_request

    request = DataRequest(
        model=model,
        out=Path(out),
        prompts=files_of(prompts),
        text=files_of(text),
        settings=settings_for(DataSettings, settings, keywords, "make_data"),
        overwrite=overwrite,
    )
    if dry_run:
        check_request(request)
        inputs = (*request.prompts, *request.text, *request.settings.against)
        check_files({str(out): [source for source in inputs if is_local(str(source))]})
        return None
    from moemerge.lab.data.run import run_data

    return run_data(request, progress or Silent())


@with_keywords(TuningSettings, TuningOutputSettings)
def tune(
    model: ModelLike,
    out: str | Path,
    *,
    data: Files,
    settings: TuningSettings | None = None,
    progress: Progress | None = None,
    **keywords: Any,
) -> TuningReport:
    """Fine-tune `model` on the answers of the rows in `data`, and write it to `out` in its layout.

    `resume` continues from the last saved state. Under torchrun or `accelerate launch` every
    process must call this function; rank 0 writes.
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
    bar = progress or Silent()
    with uploaded(request.out, output.push_to_hub if leads() else None, bar):
        return run_tuning(request, bar)


@with_keywords(EvaluationSettings, EvaluationOutputSettings)
def evaluate(
    models: ModelLike | Sequence[ModelLike],
    tasks: str | Sequence[str] = (),
    *,
    data: Mapping[str, Files] | None = None,
    settings: EvaluationSettings | None = None,
    progress: Progress | None = None,
    **keywords: Any,
) -> EvaluationReport:
    """Let `models` solve `tasks` (names or YAML files), and compare them problem by problem.

    All answers are kept in the folder `out`, and existing ones are not generated again. `data` are
    files of problems by task, which replace those of the task. `rescore` judges the answers in
    `out` again, without any model; `models` may then be empty, for all of them.
    """
    from moemerge.lab.benchmarks import EvaluationRequest
    from moemerge.lab.evaluate import run_evaluation

    output, values = output_for(EvaluationOutputSettings, keywords, "evaluate")
    request = EvaluationRequest(
        models=[models] if isinstance(models, ModelLike) else list(models),
        tasks=[tasks] if isinstance(tasks, str) else list(tasks),
        settings=settings_for(EvaluationSettings, settings, values, "evaluate"),
        output=output,
        data={name: files_of(files) for name, files in (data or {}).items()},
    )
    return run_evaluation(request, progress or Silent())


def sample(
    models: Mapping[str, ModelLike],
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 48,
    device: str = "auto",
    progress: Progress | None = None,
) -> dict[str, list[str]]:
    """Return each model's greedy completion of each prompt, without special tokens.

    One model at a time is loaded whole. If a model cannot run, its entry states why.
    """
    result = {}
    for name, model in models.items():
        try:
            result[name] = _completions(
                model, prompts, max_new_tokens, device, progress or Silent()
            )
        except MoeMergeError as error:
            result[name] = [f"(could not run: {error.message})"]
    return result


def _completions(
    model: ModelLike, prompts: Sequence[str], most: int, device: str, progress: Progress
) -> list[str]:
    from moemerge.lab.engines import CompletionRequest, engine_maker, load_engine
    from moemerge.lab.generate import PromptRow, open_tokenizer, tokenized

    given = {"max_new_tokens": most, "device": device}
    settings = GenerationSettings.model_validate(given)
    tokenizer = open_tokenizer(model)
    rows = [
        PromptRow(f"prompt {i}", ({"role": "user", "content": text},), {}, "")
        for i, text in enumerate(prompts)
    ]
    _, tokens = tokenized(rows, tokenizer, "")
    requests = [CompletionRequest(i, 0, tuple(ids)) for i, ids in enumerate(tokens)]
    engine = load_engine(engine_maker(model, tokenizer, settings, progress))
    try:
        completions = list(engine.generate(requests))
    finally:
        engine.close()
    return [c.text for c in sorted(completions, key=lambda c: c.prompt)]
