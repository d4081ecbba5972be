"""Every setting of `moemerge evaluate`, with the defaults that the command line and the API use."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from moemerge.config.fields import PositiveInt, Strict
from moemerge.config.generation import (
    MAX_NEW_TOKENS,
    SAMPLES,
    TEMPERATURE,
    EngineKeywords,
    EngineSettings,
    Temperature,
    Texts,
)
from moemerge.config.settings import Flag

Protocol = Literal["correct", "paper"]


class EvaluationSettings(EngineSettings):
    """How models are asked, and how their answers are judged."""

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
    draws: PositiveInt = Field(
        10_000, description="draws of problems behind every interval and p value"
    )


class EvaluationKeywords(EngineKeywords, total=False):
    """`EvaluationSettings` one by one."""

    protocol: Protocol
    samples: int
    temperature: float
    max_new_tokens: int | None
    limit: int | None
    plain: bool
    allow_code: bool
    workers: int | None
    draws: int


class EvaluationOutputSettings(Strict):
    """Where answers are kept, and what is written about them."""

    out: Path = Field(Path("evaluation"), description="folder that keeps all answers and results")
    rescore: Flag = Field(
        False, description="judge the answers that are kept anew, without any model"
    )
    lm_eval: Texts = Field((), description="tasks of lm-eval, or files of its kind, as well")
    report: Path | None = Field(None, description="write an HTML page of the results there")
    card: Flag = Field(
        False, description="write the scores into the README.md of each model folder (model-index)"
    )


class EvaluationOutKeywords(EvaluationKeywords, total=False):
    """`EvaluationSettings` and `EvaluationOutputSettings` one by one."""

    out: str | Path
    rescore: bool
    lm_eval: str | Sequence[str] | tuple[str, ...]
    report: str | Path | None
    card: bool
