"""Every setting of `moemerge data`, with the defaults that the command line and the API use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from moemerge.config.faults import FaultsError
from moemerge.config.fields import PositiveInt, Strict
from moemerge.config.generation import GenerationKeywords, GenerationSettings, Texts

PROMPT = "{prompt}"


def _columns(raw: object) -> object:
    """`prompt=problem,answer=expected_answer`, or a mapping of the same."""
    if not isinstance(raw, str):
        return raw
    pairs = [pair.strip() for pair in raw.split(",") if pair.strip()]
    for pair in pairs:
        if not all(part.strip() for part in pair.partition("=")):
            raise FaultsError.one(f"expected NAME=COLUMN,..., not {pair!r}")
    return {name.strip(): column.strip() for name, _, column in (p.partition("=") for p in pairs)}


Column = Literal["prompt", "answer", "reference", "tests", "text"]
Columns = Annotated[dict[Column, str], BeforeValidator(_columns)]
Keep = Literal["correct", "all", "prompt", "reference"]


def _template(raw: object) -> object:
    if isinstance(raw, str) and PROMPT not in raw:
        raise FaultsError.one(f"{raw!r} has no {PROMPT} in it")
    return raw


class KeepingSettings(Strict):
    """Which rows are asked, how answers are judged, and what is kept."""

    verify: str = Field(
        "none",
        description="how answers are judged: math, code, exact, choice, MODULE:FUNCTION, or none",
    )
    keep: Keep = Field(
        "correct",
        description="the model's right answers, all its answers, the prompts alone, or the "
        "rows' own solutions",
    )
    map: Columns = Field(
        {}, description="columns by what they hold: prompt=problem,answer=expected_answer"
    )
    template: Annotated[str, BeforeValidator(_template)] = Field(
        PROMPT, description="what is asked: {prompt}, or words around it and other columns"
    )
    system: str | None = Field(None, description="a system message before every prompt")
    prefill: str = Field("", description="how every answer begins")
    limit: PositiveInt | None = Field(None, description="most prompts, or rows of text")
    rows: PositiveInt | None = Field(None, description="most rows that are kept")
    balance: str | None = Field(
        None, description="column whose values get equal shares of limit and rows (default: file)"
    )
    per_prompt: PositiveInt | None = Field(
        None, description="most answers kept of one prompt (default: all that differ)"
    )
    against: Texts = Field(
        (), description="benchmarks (files or hub ids): prompts that overlap with them are left out"
    )
    ngram: PositiveInt = Field(13, description="words in a row that make an overlap")
    allow_code: Annotated[bool, Field(strict=True)] = Field(
        False, description="run programs that the model writes, in a sandbox"
    )
    workers: PositiveInt | None = Field(
        None, description="answers judged at a time (default: one for each core)"
    )
    completions: Path | None = Field(
        None, description="write all answers with their judgements there"
    )


class DataSettings(GenerationSettings, KeepingSettings):
    """Everything about calibration text: what is kept, and how answers are drawn."""


class DataKeywords(GenerationKeywords, total=False):
    """`DataSettings` one by one."""

    verify: str
    keep: Keep
    map: str | Mapping[str, str] | dict[Column, str]
    template: str
    system: str | None
    prefill: str
    limit: int | None
    rows: int | None
    balance: str | None
    per_prompt: int | None
    against: str | Sequence[str] | tuple[str, ...]
    ngram: int
    allow_code: bool
    workers: int | None
    completions: str | Path | None
