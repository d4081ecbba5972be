"""How good models are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Unpack

from moemerge.api.jobs import Model, files_of, settings_for
from moemerge.config.evaluation import (
    EvaluationOutKeywords,
    EvaluationOutputSettings,
    EvaluationSettings,
)
from moemerge.config.settings import with_keywords
from moemerge.config.translate import parse_settings
from moemerge.runtime.progress import Progress, Silent

if TYPE_CHECKING:
    from moemerge.api.jobs import Files
    from moemerge.evaluation import EvaluationReport


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

    values = {n: v for n, v in keywords.items() if n in EvaluationOutputSettings.model_fields}
    others = {n: v for n, v in keywords.items() if n not in values}
    request = EvaluationRequest(
        models=[models] if isinstance(models, Model) else list(models),
        tasks=[tasks] if isinstance(tasks, str) else list(tasks),
        settings=settings_for(EvaluationSettings, settings, others, "evaluate"),
        output=parse_settings(EvaluationOutputSettings, values, "settings of evaluate"),
        data={name: files_of(files) for name, files in (data or {}).items()},
    )
    return run_evaluation(request, Silent() if progress is None else progress)
