"""Schemas of JSON files other than configs, other tools' and our own; checked on reading.

Unknown keys are ignored, since later versions may add some.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from moemerge.config.faults import faults_of, path_text
from moemerge.config.parameters import StatisticsKind
from moemerge.errors import CheckpointError, MoeMergeError

D = TypeVar("D", bound="FileSchema")
Count = Annotated[int, Field(ge=0, lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
# Saved by tools that write null for "not given".
Switch = Annotated[bool, BeforeValidator(lambda value: False if value is None else value)]


class FileSchema(BaseModel):
    """Frozen, with strict types: neither true nor "1" is a number."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


def parse_document(
    kind: type[D],
    data: object,
    where: str,
    hint: str | None = None,
    raises: Callable[..., MoeMergeError] = CheckpointError,
) -> D:
    """Validate `data` as a document of this kind; the error names the fault and `where`."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        faults = [f"{path_text(f.path)} {f.message}".strip() for f in faults_of(error)[:3]]
        raise raises(f"{where}: {'; '.join(faults)}", hint=hint) from error


class AdapterDocument(FileSchema):
    """PEFT's adapter_config.json: the fields that decide what a LoRA does."""

    r: Annotated[int, Field(ge=1, lt=2**31)]
    lora_alpha: Finite
    use_rslora: Switch = False
    use_dora: Switch = False
    fan_in_fan_out: Switch = False
    rank_pattern: dict[str, Annotated[int, Field(ge=1, lt=2**31)]] | None = None
    alpha_pattern: dict[str, Finite] | None = None
    target_parameters: list[str] | None = None
    peft_version: str | None = None
    lora_B_layout: Literal["rank_major", "grouped_by_expert"] | None = None  # noqa: N815
    auto_mapping: dict[str, Any] | None = None


class Provenance(FileSchema):
    """The model, the text and the settings of collected statistics."""

    model: str  # as the user named it
    family: str
    model_fingerprint: str
    tokenizer_fingerprint: str | None  # None: a model without a tokenizer
    data_fingerprint: str  # of the tokens themselves, in their order
    tokens: Count
    sequences: Count
    seed: int
    version: str  # of moemerge
    dtype: str  # of the forward pass
    device: str  # cpu or cuda: the last bits depend on it


class StatisticsDocument(FileSchema):
    """The metadata of a file of statistics."""

    kind: StatisticsKind
    provenance: Provenance
    # Tensor and shape of each unit.
    units: dict[str, Annotated[list[str | list[Count]], Field(min_length=2, max_length=2)]]
    tokens: dict[str, Count]
    sequences: Count
    notices: list[str]


class JournalTensor(FileSchema):
    name: str
    dtype: str
    shape: list[Count]


class JournalDocument(FileSchema):
    """One finished entry of a journal."""

    entry: str
    tensors: list[JournalTensor]
    row: dict[str, Any]
    digest: str


class KeptModel(FileSchema):
    """The location of a model's part, and the model it was derived from."""

    folder: Annotated[str, Field(pattern=r"^[0-9]{1,4}$")]
    model: str
    scale: Finite
    digest: str | None = None  # of its file; older merges have none


class KeptDocument(FileSchema):
    """The parts of its models that a merge kept."""

    keep: Literal["tall", "emr", "twin"]
    base: str
    base_fingerprint: str | None = None
    tasks: dict[str, KeptModel]


class MergedModel(FileSchema):
    model: str
    base: bool = False


class NeededSettings(FileSchema):
    """Settings that a merge depends on but its config does not contain."""

    requantize: Literal["no", "same"] = "no"
    allow_nonfinite: bool = False


class MergeDocument(FileSchema):
    """The part of a merge's report that later model cards repeat."""

    method: str
    inputs: dict[str, MergedModel]
    settings: NeededSettings = NeededSettings()


class CalibratedLayer(FileSchema):
    layer: Count


class CalibrationDocument(FileSchema):
    """The part of a calibration's report that a diagnosis reads."""

    layers: list[CalibratedLayer]
    settings: dict[str, Any] | None = None


class RefittedLayer(FileSchema):
    layer: Count | None  # None: the head
    error_left: dict[str, dict[str, float | None]] = {}
    drift_before: dict[str, float | None] = {}
    drift_after: dict[str, float | None] = {}


class RefitDocument(FileSchema):
    """The part of a refit's report that a diagnosis reads."""

    layers: list[RefittedLayer]


class AddedTokenDocument(FileSchema):
    content: str


AnyToken = str | AddedTokenDocument
IdText = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class TokenizerDocument(FileSchema):
    """tokenizer.json: the fields that are read besides the vocabulary."""

    added_tokens: list[AddedTokenDocument] | None = None


class TokenizerConfigDocument(FileSchema):
    """tokenizer_config.json and special_tokens_map.json."""

    added_tokens_decoder: dict[IdText, AddedTokenDocument] | None = None
    additional_special_tokens: list[AnyToken] | dict[str, AnyToken] | None = None
    extra_special_tokens: list[AnyToken] | dict[str, AnyToken] | None = None
    bos_token: AnyToken | None = None
    eos_token: AnyToken | None = None
    unk_token: AnyToken | None = None
    sep_token: AnyToken | None = None
    pad_token: AnyToken | None = None
    cls_token: AnyToken | None = None
    mask_token: AnyToken | None = None
