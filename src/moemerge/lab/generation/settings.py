"""Every setting of generation, with the defaults that the command line and the API use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypedDict

from pydantic import BeforeValidator, Field

from moemerge.config.faults import EMPTY, FaultsError
from moemerge.config.fields import PositiveInt, Strict
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


class PromptKeywords(TypedDict, total=False):
    """The fields of `PromptSettings` as keywords."""

    map: str | Mapping[str, str] | dict[Column, str]
    template: str
    system: str | None
    prefill: str


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


class EngineKeywords(TypedDict, total=False):
    """The fields of `EngineSettings` as keywords."""

    top_p: float
    top_k: int
    seed: int
    engine: Engine
    url: str | Sequence[str] | tuple[str, ...]
    served_model: str | None
    batch_size: int | None
    device: str
    dtype: Dtype


class GenerationSettings(EngineSettings):
    """How completions are drawn, and what runs the model."""

    common = "samples temperature max_new_tokens"

    samples: PositiveInt = Field(1, description=SAMPLES)
    temperature: Temperature = Field(0.0, description=TEMPERATURE)
    max_new_tokens: PositiveInt = Field(1024, description=MAX_NEW_TOKENS)
    stop: Texts = Field((), description="texts that end a completion, and are not part of it")


class GenerationKeywords(EngineKeywords, total=False):
    """The fields of `GenerationSettings` as keywords."""

    samples: int
    temperature: float
    max_new_tokens: int
    stop: str | Sequence[str] | tuple[str, ...]
