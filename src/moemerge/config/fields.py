"""The field types of a config and the strict base of its models.

A validator raises `FaultsError`, so that a fault deep in a value keeps its path and message.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from moemerge.config.faults import (
    EMPTY,
    Fault,
    FaultsError,
    Path,
    faults_of,
    listed,
    path_text,
    shown,
    suggested,
)
from moemerge.config.models import ModelRef
from moemerge.config.parameter_values import ParameterValue, parse_value
from moemerge.errors import ConfigError, UsageError
from moemerge.registry import did_you_mean
from moemerge.runtime.dtypes import FLOAT_NAMES

LARGEST: Final = 1e30  # a number above it would overflow float32 in the first step
LAYER_FORMS: Final = "all, last:4, 8-15, 3 or 0,2,5-7"
_LAST: Final = re.compile(r"last:([0-9]+)")
_RANGE: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")


@dataclass(frozen=True)
class LayerSelection:
    """A selection of layers as users write it; both ends of a range are included."""

    text: str = "all"

    @classmethod
    def parse(cls, value: object) -> LayerSelection:
        """Check the form; `resolve` checks whether the layers exist."""
        if isinstance(value, cls):
            return value
        if isinstance(value, (list, tuple)):
            text = ",".join(str(item) for item in value)
        elif isinstance(value, (int, str)) and not isinstance(value, bool):
            text = str(value)
        else:
            raise UsageError(f"layers must be {LAYER_FORMS}, not {value!r}")
        selection = cls(re.sub(r"\s+", "", text))
        selection._ranges()
        return selection

    def resolve(self, count: int) -> tuple[int, ...]:
        """Return the layer numbers, ascending, in a model (or list of MoE layers) of `count`
        layers."""
        chosen: set[int] = set()
        for low, high in self._ranges():
            start = count + low if low < 0 else low
            stop = count if high is None else high + 1
            if start < 0 or stop > count:
                raise UsageError(
                    f"layers {self.text!r}: the model has {count} layers, 0 to {count - 1}",
                    hint=f"choose among them: {LAYER_FORMS}",
                )
            chosen.update(range(start, stop))
        return tuple(sorted(chosen))

    def _ranges(self) -> list[tuple[int, int | None]]:
        """Return inclusive (first, last); `last:4` is (-4, None), `all` is (0, None)."""
        if self.text == "all":
            return [(0, None)]
        if match := _LAST.fullmatch(self.text):
            if int(match[1]) == 0:
                raise UsageError("layers 'last:0' selects none", hint=f"use {LAYER_FORMS}")
            return [(-int(match[1]), None)]
        return [self._range(part) for part in self.text.split(",")]

    def _range(self, part: str) -> tuple[int, int | None]:
        match = _RANGE.fullmatch(part)
        if not match:
            raise UsageError(
                f"layers {self.text!r}: cannot read {part!r}", hint=f"use {LAYER_FORMS}"
            )
        low, high = int(match[1]), int(match[2] or match[1])
        if high < low:
            raise UsageError(
                f"layers {self.text!r}: {part!r} runs backwards", hint=f"write {high}-{low}"
            )
        return low, high

    def __str__(self) -> str:
        return self.text


_DEVICE: Final = re.compile(r"auto|cpu|cuda(:[0-9]+)?")
MIN_TEMPLATE_LENGTH: Final = 20  # mergekit's rule: anything shorter is a misspelt name
CHAT_TEMPLATES: Final = ("auto", "alpaca", "chatml", "exaone", "llama3", "mistral")
_OVERRIDE: Final = (
    "override_architecture is not supported: the architecture is read from each model's config.json"
)


Base = TypeVar("Base", bound="Strict")


class Strict(BaseModel):
    """Frozen; unknown keys are faults with a suggestion; an explicit null means "not given"."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    inert: ClassVar[Mapping[str, str]] = {}  # keys that mergekit accepts without any effect
    blocks: ClassVar[tuple[str, ...]] = ()  # keys that, left empty, mean a block of defaults
    common: ClassVar[str] = ""  # fields whose flags `--help` lists first

    if not TYPE_CHECKING:  # checkers see a keyword for each field

        def __init__(self, **values: Any) -> None:
            try:
                self.__pydantic_validator__.validate_python(values, self_instance=self)
            except ValidationError as error:
                texts = [f"{path_text(p.path)}: {p.message}" for p in faults_of(error)]
                raise ConfigError.from_problems(type(self).__name__, texts) from None

        # Says that validation need not come by here, as it does for an `__init__` with effects.
        __init__.__pydantic_base_init__ = True

    def narrowed(self, base: type[Base]) -> Base:
        """Return the fields of one of its base classes as an instance of that class."""
        values = {name: getattr(self, name) for name in base.model_fields}
        return base.model_construct(self.model_fields_set & values.keys(), **values)

    @model_validator(mode="wrap")
    @classmethod
    def _known_keys(cls, data: Any, handler: ModelWrapValidatorHandler[Any]) -> Any:
        if not isinstance(data, Mapping):
            return handler(data)
        faults = [
            Fault((key,), cls._unknown(str(key)), ignorable=True)
            for key in data
            if key not in cls.model_fields
        ]
        given = {
            key: {} if value is None and key in cls.blocks else value
            for key, value in data.items()
            if key in cls.model_fields and (value is not None or key in cls.blocks)
        }
        try:
            result = handler(cls.prepare(given))
        except ValidationError as error:
            faults += faults_of(error)
        except FaultsError as error:
            faults += error.faults
        if faults:
            raise FaultsError(faults)
        return result

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Check or fill in values that depend on several fields, before the fields are read."""
        return data

    @classmethod
    def _unknown(cls, key: str) -> str:
        if key in cls.inert:
            return cls.inert[key]
        return f"unknown key{suggested(key, cls.model_fields, 'known here')}"


def model_ref(raw: object) -> ModelRef:
    """Read a model from text, from mergekit's mapping, or from an object."""
    if isinstance(raw, ModelRef):
        return raw
    if isinstance(raw, os.PathLike):
        return ModelRef(os.fspath(raw))
    try:
        if isinstance(raw, str):
            return ModelRef.parse(raw)
        if isinstance(raw, Mapping):
            _model_keys(raw)
            return ModelRef.from_mapping(raw)
    except ConfigError as error:
        raise FaultsError.one(str(error).replace("\n  ", ": ")) from None
    raise FaultsError.one(f"expected a model path or hub id, not {shown(raw)}: put it in quotes")


def _model_keys(raw: Mapping[str, Any]) -> None:
    faults: list[Fault] = []
    whole = "model" in raw
    known = ("model", "lora", "override_architecture") if whole else ("path", "revision")
    places: list[tuple[Path, Mapping[str, Any], tuple[str, ...]]] = [((), raw, known)]
    places += [
        ((side,), raw[side], ("path", "revision", *extra))
        for side, extra in (("model", ()), ("lora", ("layout",)))
        if whole and isinstance(raw.get(side), Mapping)
    ]
    for path, mapping, keys in places:
        for key, value in mapping.items():
            if key not in keys:
                faults.append(
                    Fault((*path, key), f"unknown key{did_you_mean(str(key), keys)}", True)
                )
            elif key == "override_architecture" and value is not None:
                faults.append(Fault((*path, key), _OVERRIDE, True))
    if faults:
        raise FaultsError(faults)


def dtype_field(raw: object) -> str:
    """Read `bfloat16` or `torch.bfloat16` as the short name."""
    if not isinstance(raw, str):
        raise FaultsError.one(f"expected a dtype ({listed(FLOAT_NAMES)}), not {shown(raw)}")
    short = raw.removeprefix("torch.")
    if short == "int64":
        raise FaultsError.one(
            "int64 cannot hold weights: merging would round them to whole numbers"
        )
    if short not in FLOAT_NAMES:
        raise FaultsError.one(f"unknown dtype {raw!r}{suggested(short, FLOAT_NAMES)}")
    return short


def chat_template(raw: object) -> str:
    """Read `auto`, the name of a built-in template, or a Jinja template."""
    if not isinstance(raw, str):
        raise FaultsError.one(f"expected a name or a Jinja template, not {shown(raw)}")
    if raw in CHAT_TEMPLATES or (len(raw) >= MIN_TEMPLATE_LENGTH and "{" in raw):
        return raw
    close = did_you_mean(raw, CHAT_TEMPLATES)
    raise FaultsError.one(
        f"{shown(raw)} is neither a known chat template ({listed(CHAT_TEMPLATES)}) nor a Jinja "
        f"template (at least {MIN_TEMPLATE_LENGTH} characters with a '{{' in it){close}"
    )


def layer_selection(raw: object) -> LayerSelection:
    try:
        return LayerSelection.parse(raw)
    except UsageError as error:
        raise FaultsError.one(str(error).replace("\n  ", ": ")) from None


def device_name(raw: object) -> str:
    """Check the form of a device name; the device itself is checked when it is used."""
    if isinstance(raw, str) and _DEVICE.fullmatch(raw):
        return raw
    raise FaultsError.one(f"unknown device {shown(raw)}: use auto, cpu, cuda or cuda:N")


def auto_or_share(raw: object) -> Literal["auto"] | float:
    """Read `auto`, or a number from 0 to less than 1."""
    if raw == "auto":
        return "auto"
    if isinstance(raw, (int, float)) and not isinstance(raw, bool) and 0 <= raw < 1:
        return float(raw)
    raise FaultsError.one(f"must be auto or a number from 0 to less than 1, not {shown(raw)}")


def layer_range(raw: object) -> tuple[int, int]:
    """Read `[a, b]`: layers a to b - 1."""
    numbers = raw if isinstance(raw, (list, tuple)) else ()
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in numbers)
    if len(numbers) != 2 or not whole:
        raise FaultsError.one(f"expected [first, end] (end not included), not {shown(raw)}")
    first, end = numbers
    if first < 0 or end <= first:
        raise FaultsError.one(
            f"[{first}, {end}] holds no layer: expected 0 <= first < end (end is not included)"
        )
    return first, end


def not_empty(raw: object) -> object:
    if isinstance(raw, (list, tuple, Mapping)) and not raw:
        raise FaultsError.one(EMPTY)
    return raw


def _files(raw: object) -> object:
    return (raw,) if isinstance(raw, (str, os.PathLike)) else raw


def _file(raw: object) -> str:
    if isinstance(raw, (str, os.PathLike)) and str(raw):
        return os.fspath(raw)
    raise FaultsError.one(f"expected a file name, not {shown(raw)}")


def read_by(read: Callable[[Any], object], form: Any) -> PlainValidator:
    """Return a validator that calls `read`; `form` is the value's type in a file, for editors."""
    return PlainValidator(read, json_schema_input_type=form)


def auto_or_positive(raw: object) -> float | Literal["auto"]:
    """Read `auto`, or a number above zero."""
    if raw == "auto":
        return "auto"
    if isinstance(raw, int | float) and not isinstance(raw, bool) and 0.0 < raw <= LARGEST:
        return float(raw)
    raise FaultsError.one(
        f"expected auto, or a number above 0 and at most {LARGEST:g}, not {shown(raw)}"
    )


ModelForm = str | dict[str, Any]
DtypeForm = Annotated[
    str, WithJsonSchema({"enum": [f"{p}{n}" for p in ("", "torch.") for n in FLOAT_NAMES]})
]
ModelField = Annotated[ModelRef, read_by(model_ref, ModelForm)]
DtypeField = Annotated[str, read_by(dtype_field, DtypeForm)]
ChatTemplateField = Annotated[str, read_by(chat_template, str)]
AutoOrPositive = Annotated[
    float | Literal["auto"], read_by(auto_or_positive, float | Literal["auto"])
]
LayerRange = Annotated[tuple[int, int], read_by(layer_range, list[int])]
ValueForm = float | bool | str | dict[str, Any] | list[float | dict[str, Any]]
ValueField = Annotated[ParameterValue, read_by(parse_value, ValueForm)]
Parameters = dict[str, ValueField]
Name = Annotated[str, Field(min_length=1)]
NotEmpty = BeforeValidator(not_empty)
FileName = Annotated[str, read_by(_file, str)]
Files = Annotated[
    tuple[FileName, ...],
    NotEmpty,
    BeforeValidator(_files, json_schema_input_type=str | list[str]),
]
DataFiles = Annotated[dict[str, Files], NotEmpty]
PositiveInt = Annotated[int, Field(strict=True, ge=1)]
Positive = Annotated[float, Field(gt=0, le=LARGEST, allow_inf_nan=False)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
