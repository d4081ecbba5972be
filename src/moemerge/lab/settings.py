"""Every setting of `moemerge evaluate`, with its defaults, and what a task file says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field

from moemerge.config.fields import Name, PositiveInt, Strict
from moemerge.config.settings import MAP, MAX_LENGTH, Flag, TextColumns
from moemerge.config.text_settings import (
    MAX_NEW_TOKENS,
    SAMPLES,
    TEMPERATURE,
    EngineSettings,
    PromptSettings,
    Temperature,
    Texts,
)
from moemerge.config.yaml_lines import TASK, read_document, require_kind

Protocol = Literal["correct", "paper"]
PERPLEXITY: Final = "perplexity"  # the task whose texts are given as data


class EvaluationSettings(EngineSettings):
    """How models are asked, and how their answers are judged."""

    common = "samples temperature limit allow_code"

    protocol: Protocol = Field(
        "correct", description="scoring: without known faults, or as published with them"
    )
    samples: PositiveInt = Field(16, description=SAMPLES)
    temperature: Temperature = Field(0.1, description=TEMPERATURE)
    max_new_tokens: PositiveInt | None = Field(
        None, description=f"{MAX_NEW_TOKENS} (default: the task's)"
    )
    limit: PositiveInt | None = Field(
        None, description="most problems of each task, drawn at random (default: all)"
    )
    plain: Flag = Field(False, description="ask without the chat template, in plain text")
    allow_code: Flag = Field(False, description="run programs that the models write, in a sandbox")
    workers: PositiveInt | None = Field(
        None, description="answers judged at a time (default: one for each core)"
    )
    draws: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        10_000, description="draws of problems behind every interval and p value"
    )
    # Of the task `perplexity` alone:
    max_length: PositiveInt = MAX_LENGTH
    group: Name | None = Field(
        None,
        description="field of rows of plain text, such as a document's name: rows that share its "
        "value are one document",
    )
    map: TextColumns = MAP


class EvaluationOutputSettings(Strict):
    """Where answers are kept, and what is written about them."""

    common = "out rescore report"

    out: Path = Field(Path("evaluation"), description="folder that keeps all answers and results")
    rescore: Flag = Field(
        False, description="judge the answers that are kept anew, without any model"
    )
    lm_eval: Texts = Field((), description="tasks of lm-eval, or files of its kind, as well")
    report: Path | None = Field(None, description="write an HTML page of the results there")
    overwrite: Flag = Field(False, description="replace an earlier report")
    card: Flag = Field(
        False, description="write the scores into the README.md of each model folder (model-index)"
    )


# --- task files -----------------------------------------------------------------------------------


class PublishedScoring(Strict):
    """What protocol `paper` does otherwise."""

    verify: str | None = Field(None, description="how answers are judged there")
    samples: PositiveInt | None = Field(None, description="only so many samples count there")


class TaskSettings(PromptSettings):
    """A task. Its completions do not depend on the protocol, only their scores do."""

    title: str = Field(description="its name in tables")
    domain: str = Field("other", description="tasks of one domain are averaged")
    data: str | None = Field(
        None, description="a file, or files of a hub data set: org/name@revision:PATTERN"
    )
    problems: PositiveInt | None = Field(None, description="how many the data should hold")
    verify: str = Field(description="how answers are judged")
    paper: PublishedScoring | None = Field(None, description="what protocol `paper` does otherwise")
    needs_chat_template: Flag = Field(
        False, description="refuse models without one (unless they are asked in plain text)"
    )
    max_new_tokens: PositiveInt = Field(1024, description=MAX_NEW_TOKENS)
    stop: Texts = Field((), description="texts that end a completion, and are not part of it")


def load_task(path: Path) -> TaskSettings:
    """Read a task file; all that is wrong with it comes in one error."""
    document = read_document(path)
    require_kind(document, TASK)
    return document.parse(TaskSettings)
