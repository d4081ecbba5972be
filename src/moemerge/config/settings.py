"""Settings: fields that jobs share, the settings of a merge, and flags derived from settings.

The settings of each job are one frozen class. Command-line flags and Python keywords are derived
from the fields: a field's description is the help of its flag.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Final,
    Literal,
    TypeVar,
)

from pydantic import BeforeValidator, Field

from moemerge.config.faults import FaultsError, parse_settings
from moemerge.config.fields import (
    LayerSelection,
    Name,
    PositiveInt,
    Strict,
    auto_or_share,
    device_name,
    layer_selection,
    model_ref,
    read_by,
)
from moemerge.errors import UsageError
from moemerge.registry import loaded_plugins

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=Strict)
Dtype = Literal["auto", "float32", "float16", "bfloat16", "float64"]
Offload = Literal["auto", "device", "cpu", "disk"]
DeviceField = Annotated[str, read_by(device_name, str)]
LayersForm = LayerSelection | str | int | Sequence[str | int]
LayersField = Annotated[LayerSelection, read_by(layer_selection, str | int | list[str | int])]
ModelName = Annotated[str, read_by(lambda raw: str(model_ref(raw)), str)]
Flag = Annotated[bool, Field(strict=True)]
# The share that a holdout of `auto` keeps out, if a domain has at least this many rows.
AUTO_HOLDOUT: Final = 0.1
AUTO_HOLDOUT_ROWS: Final = 100
AUTO_HOLDOUT_HELP: Final = "(auto: a tenth of a domain with 100 rows or more, otherwise none)"
Share = Annotated[
    float | Literal["auto"],
    read_by(auto_or_share, Annotated[float, Field(ge=0, lt=1)] | Literal["auto"]),
]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]  # what every generator takes
Requantize = Literal["no", "same"]

# Settings of every job that runs a model on text, with one description and one default.
LAYERS: Any = Field(LayerSelection(), description="which MoE layers: all, last:4, 8-15 or 0,2,5-7")
MAX_TOKENS: Any = Field(None, description="most tokens of each domain (default: all)")
MAX_LENGTH: Any = Field(2048, description="tokens at which a row is cut")
GROUP: Any = Field(
    None,
    description="field of the rows, such as a document's name: rows that share its value are held "
    "out together",
)
LIMIT: Any = Field(None, description="most rows of each domain (default: all)")
SEED: Any = Field(0, description="seed of every random choice")
OFFLOAD: Any = Field("auto", description="where hidden states live between layers")
DEVICE: Any = Field("auto", description="where to compute: auto, cpu, cuda or cuda:N")
PUSH_TO_HUB: Any = Field(
    None, description="upload OUT, once it is whole, to this model of the hub: NAME or ORG/NAME"
)
DTYPE: Any = Field(
    "auto", description="dtype of the forward pass (auto: the checkpoint's on a GPU, else float32)"
)
REQUANTIZE: Any = Field(
    "no",
    description="write quantised weights as floats (no), or as the model had them whose config the "
    "output takes (same)",
)


def read_columns(raw: object) -> object:
    """`prompt=problem,answer=expected_answer`, or a mapping of the same."""
    if not isinstance(raw, str):
        return raw
    pairs = [pair.strip() for pair in raw.split(",") if pair.strip()]
    for pair in pairs:
        if not all(part.strip() for part in pair.partition("=")):
            raise FaultsError.one(f"expected NAME=COLUMN,..., not {pair!r}")
    return {name.strip(): column.strip() for name, _, column in (p.partition("=") for p in pairs)}


TextColumn = Literal["text", "prompt", "response"]
TextColumns = Annotated[dict[TextColumn, str], BeforeValidator(read_columns)]
MapForm = str | Mapping[str, str] | dict[TextColumn, str]
MAP: Any = Field(
    {},
    description="columns of rows in other formats: prompt=problem,response=solution or text=body",
)


class ForwardSettings(Strict):
    """Settings of every job that runs a model on text; a job adds its own."""

    common = "limit device"

    max_tokens: PositiveInt | None = MAX_TOKENS
    max_length: PositiveInt = MAX_LENGTH
    limit: PositiveInt | None = LIMIT
    seed: Seed = SEED
    map: TextColumns = MAP
    offload: Offload = OFFLOAD
    device: DeviceField = DEVICE
    dtype: Dtype = DTYPE


class PlanSettings(Strict):
    """How a merge is planned: settings that can be checked before it runs."""

    common = "device seed push_to_hub"

    device: DeviceField = DEVICE
    out_shard_size: str = Field("5GB", description="largest shard, such as 5GB or 500MB")
    memory: str | None = Field(
        None, description="memory for tensors in work, such as 2GB (default: a quarter of all)"
    )
    seed: Seed | None = Field(
        None, description="seed of the methods that draw at random (default: the config's, or 0)"
    )
    lenient: Flag = Field(
        False,
        description="warn of keys that mergekit ignores and of a config transformers cannot load",
    )
    requantize: Requantize = REQUANTIZE
    push_to_hub: Name | None = PUSH_TO_HUB


class MergeSettings(PlanSettings):
    """How a merge is run, as opposed to what it produces."""

    common = "overwrite"

    overwrite: Flag = Field(False, description="replace OUT if it exists")
    allow_nonfinite: Flag = Field(False, description="merge models that hold NaN or infinity")


class OutputSettings(Strict):
    """How the output of a repair is written; not recorded in the config."""

    common = "overwrite report"

    overwrite: Flag = Field(False, description="replace OUT, or the unfinished work of another run")
    resume: Flag = Field(
        False, description="continue a killed run (the same command does so without it)"
    )
    report: Path | None = Field(None, description="write an HTML page of the routing there")
    push_to_hub: Name | None = PUSH_TO_HUB


def with_keywords(*models: type[Strict]) -> Callable[[F], F]:
    """Make `help()` list the settings that a function takes as `**keywords`, with defaults."""
    fields = {name: info for model in models for name, info in model.model_fields.items()}
    listed = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=info.get_default(call_default_factory=True),
            annotation=info.annotation,
        )
        for name, info in fields.items()
    ]

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = list(signature.parameters.values())[:-1]
        shown = signature.replace(parameters=[*own, *listed])
        function.__signature__ = shown  # type: ignore[attr-defined]
        return function

    return decorate


def settings_for(model: type[S], settings: S | None, values: Mapping[str, Any], verb: str) -> S:
    """Return settings that were passed as one object, or one by one."""
    if settings is None:
        return parse_settings(model, values, f"settings of {verb}")
    if values:
        raise UsageError(
            f"{verb}: settings were given as a whole and also one by one: {', '.join(values)}",
            hint="give either `settings` or single values",
        )
    return settings


def output_for(model: type[S], keywords: Mapping[str, Any], verb: str) -> tuple[S, dict[str, Any]]:
    """Split keywords into the settings of the output and the others."""
    values = {n: v for n, v in keywords.items() if n in model.model_fields}
    others = {n: v for n, v in keywords.items() if n not in values}
    return parse_settings(model, values, f"settings of {verb}"), others


def plugin_flags() -> list[str]:
    """Return the flags that load the same plugins again."""
    return [word for file in loaded_plugins() for word in as_flags({"plugin": file})]


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """Return settings by name as command-line flags."""
    words: list[str] = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        words.append("--" + ("no-" if value is False else "") + flag)
        if not isinstance(value, bool):
            if isinstance(value, Mapping):
                value = [f"{key}={one}" for key, one in value.items()]
            listed = isinstance(value, list | tuple)
            words.append(",".join(map(str, value)) if listed else str(value))
    return words
