"""Settings of text that a model writes, and text in a config: files, or how to make them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from moemerge.config.faults import EMPTY, FaultsError
from moemerge.config.fields import Files, Name, NotEmpty, PositiveInt, Strict, read_by
from moemerge.config.settings import DEVICE, SEED, DeviceField, Dtype, Seed, read_columns

Natural = Annotated[int, Field(strict=True, ge=0)]
Engine = Literal["transformers", "server", "vllm"]
PROMPT = "{prompt}"


def _texts(raw: object) -> object:
    """One text, or several; none of them empty."""
    texts = (raw,) if isinstance(raw, str) else raw
    if isinstance(texts, (list, tuple)) and "" in texts:
        raise FaultsError.one(EMPTY)
    return texts


Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]


Column = Literal["prompt", "answer", "reference", "tests", "text"]
Columns = Annotated[dict[Column, str], BeforeValidator(read_columns)]


def _template(raw: object) -> object:
    if isinstance(raw, str) and PROMPT not in raw:
        raise FaultsError.one(f"{raw!r} has no {PROMPT} in it")
    return raw


class PromptSettings(Strict):
    """What is asked of each row."""

    map: Columns = Field(
        {}, description="columns by what they hold: prompt=problem,answer=expected_answer"
    )
    template: Annotated[str, BeforeValidator(_template)] = Field(
        PROMPT, description="what is asked: {prompt}, or words around it and other columns"
    )
    system: str | None = Field(None, description="a system message before every prompt")
    prefill: str = Field("", description="how every answer begins")


Temperature = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
TEMPERATURE = "0 takes the likeliest token each time"
SAMPLES = "completions of each prompt"
MAX_NEW_TOKENS = "tokens at which a completion is cut"


class EngineSettings(Strict):
    """What runs the model, and what every way of drawing has in common."""

    common = "engine device"

    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        1.0, description="draw from the likeliest tokens that hold this share of the probability"
    )
    top_k: Natural = Field(0, description="draw from this many likeliest tokens (0: from all)")
    seed: Seed = SEED
    engine: Engine = Field(
        "transformers", description="what runs the model: in this process, or a server"
    )
    url: Texts = Field(
        (), description="OpenAI-compatible server(s), such as http://localhost:8000/v1"
    )
    served_model: str | None = Field(
        None, description="the model's name on the server (default: the only one it lists)"
    )
    batch_size: PositiveInt | None = Field(
        None, description="completions written at once (default: as many as fit and pay)"
    )
    device: DeviceField = DEVICE
    dtype: Dtype = Field(
        "auto", description="dtype of the model (auto: the checkpoint's on a GPU, else float32)"
    )


class GenerationSettings(EngineSettings):
    """How completions are drawn, and what runs the model."""

    common = "samples temperature max_new_tokens"

    samples: PositiveInt = Field(1, description=SAMPLES)
    temperature: Temperature = Field(0.0, description=TEMPERATURE)
    max_new_tokens: PositiveInt = Field(1024, description=MAX_NEW_TOKENS)
    stop: Texts = Field((), description="texts that end a completion, and are not part of it")


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
