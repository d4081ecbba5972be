"""Every setting of `moemerge data`, with the defaults that the command line and the API use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from moemerge.config.fields import Files, Name, NotEmpty, PositiveInt, read_by
from moemerge.lab.generation.settings import (
    GenerationKeywords,
    GenerationSettings,
    PromptKeywords,
    PromptSettings,
    Texts,
)

Keep = Literal["correct", "all", "prompt", "reference"]


class KeepingSettings(PromptSettings):
    """Which rows are asked, how answers are judged, and what is kept."""

    common = "verify keep limit"

    verify: str = Field(
        "none",
        description="how answers are judged: math, code, exact, choice, instructions, "
        "MODULE:FUNCTION, or none",
    )
    keep: Keep = Field(
        "correct",
        description="the model's right answers, all its answers, the prompts alone, or the "
        "rows' own solutions",
    )
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


class DataRecipe(DataSettings):
    """Text of a config that is made if its file is not there: by the model of that name."""

    file: Name = Field(description="the text's file (.jsonl, .jsonl.gz)")
    prompts: Texts = Field((), description="prompts for the model, as files or hub ids")
    text: Texts = Field((), description="plain text to take as it is, instead")

    @property
    def settings(self) -> DataSettings:
        """The settings alone."""
        return self.narrowed(DataSettings)


_FILES: TypeAdapter[tuple[str, ...]] = TypeAdapter(Files)


def _text(raw: object) -> tuple[str, ...] | DataRecipe:
    if isinstance(raw, Mapping):
        return DataRecipe.model_validate(raw)
    return raw if isinstance(raw, DataRecipe) else _FILES.validate_python(raw)


Text = Annotated[tuple[str, ...] | DataRecipe, read_by(_text, str | list[str] | DataRecipe)]
NamedTexts = Annotated[dict[str, Text], NotEmpty]


def files_of(text: tuple[str, ...] | DataRecipe) -> tuple[str, ...]:
    """Where a config's text is, or will be."""
    return (text.file,) if isinstance(text, DataRecipe) else text


class DataKeywords(GenerationKeywords, PromptKeywords, total=False):
    """The fields of `DataSettings` as keywords."""

    verify: str
    keep: Keep
    limit: int | None
    rows: int | None
    balance: str | None
    per_prompt: int | None
    against: str | Sequence[str] | tuple[str, ...]
    ngram: int
    allow_code: bool
    workers: int | None
    completions: str | Path | None
