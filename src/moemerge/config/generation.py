"""Every setting of generation, with the defaults that the command line and the API use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypedDict

from pydantic import BeforeValidator, Field

from moemerge.config.faults import EMPTY, FaultsError
from moemerge.config.fields import PositiveInt, Strict
from moemerge.config.settings import DEVICE, SEED, DeviceField, Dtype, Seed

Natural = Annotated[int, Field(strict=True, ge=0)]
Engine = Literal["transformers", "server", "vllm"]


def _texts(raw: object) -> object:
    """One text, or several; none of them empty."""
    texts = (raw,) if isinstance(raw, str) else raw
    if isinstance(texts, (list, tuple)) and "" in texts:
        raise FaultsError.one(EMPTY)
    return texts


Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]


class GenerationSettings(Strict):
    """How completions are drawn, and what runs the model."""

    samples: PositiveInt = Field(1, description="completions of each prompt")
    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = Field(
        0.0, description="0 takes the likeliest token each time"
    )
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = Field(
        1.0, description="draw from the likeliest tokens that hold this share of the probability"
    )
    top_k: Natural = Field(0, description="draw from this many likeliest tokens (0: from all)")
    max_new_tokens: PositiveInt = Field(1024, description="tokens at which a completion is cut")
    stop: Texts = Field((), description="texts that end a completion, and are not part of it")
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


class GenerationKeywords(TypedDict, total=False):
    """`GenerationSettings` one by one."""

    samples: int
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    stop: str | Sequence[str] | tuple[str, ...]
    seed: int
    engine: Engine
    url: str | Sequence[str] | tuple[str, ...]
    served_model: str | None
    batch_size: int | None
    device: str
    dtype: Dtype
