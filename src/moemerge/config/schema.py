"""A config file as frozen data: mergekit's keys, ours, and a block for every repair.

These classes hold what was written. `resolve.normalise` turns it into what a merge needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar

from pydantic import BeforeValidator, Field, create_model, model_validator

from moemerge.config.faults import Fault, FaultsError, Path, listed
from moemerge.config.fields import (
    ChatTemplateField,
    DataFiles,
    DtypeField,
    FileName,
    LayerRange,
    ModelField,
    ModelForm,
    Name,
    NotEmpty,
    Parameters,
    PositiveInt,
    Strict,
    model_ref,
    read_by,
)
from moemerge.config.job_settings import CollectingBlock
from moemerge.config.models import ModelRef
from moemerge.config.parameters import BasePolicy, MethodSchema
from moemerge.config.repair_settings import CALIBRATION, DISTILLATION, PRUNE, REFIT
from moemerge.config.repairs import Repair, RepairBlock
from moemerge.config.text_settings import NamedTexts

# Pruning and all repairs. An earlier one may be followed by a later one, whose report keeps its
# part.
REPAIRS: Final[tuple[Repair, ...]] = (PRUNE, CALIBRATION, REFIT, DISTILLATION)
M = TypeVar("M", bound=Strict)
Keep = Literal["tall", "emr", "twin"]
TASKS: Path = ("tasks",)
_KEPT_BY = {"threshold": "tall", "rank": "twin"}


class KeptModels(Strict):
    """What is kept of every merged model in addition to the merge."""

    keep: Keep = Field(..., description="tall or emr: a mask; twin: a low-rank rest")
    threshold: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = Field(
        0.4, description="tall: an element is the model's where |δ_i| > threshold·|Δ - δ_i|"
    )
    rank: PositiveInt = Field(8, description="twin: singular directions that are kept")

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        for name, keep in _KEPT_BY.items():
            if name in data and data.get("keep") != keep:
                raise FaultsError.one(f"is for `keep: {keep}` alone: remove it", name)
        return data


class ModelEntry(Strict):
    """One of `models:`. `name` pairs the model with its calibration text."""

    model: ModelField
    name: Name | None = None
    parameters: Parameters = Field(default_factory=dict)


class SliceSource(ModelEntry):
    """One of a slice's `sources:`; `layer_range` is [first, end), end not included."""

    layer_range: LayerRange


class SliceEntry(Strict):
    """One of `slices:`: layers that are merged with each other and stacked on the slices before."""

    inert: ClassVar[Mapping[str, str]] = {
        "residual_weight": "residual_weight has no effect (mergekit accepts and never uses it): "
        "remove it"
    }

    sources: Annotated[tuple[SliceSource, ...], NotEmpty]
    base_model: ModelField | None = None
    parameters: Parameters = Field(default_factory=dict)


class Body(Strict):
    """The models to merge: exactly one of `models` and `slices` (or `modules` at the top)."""

    models: Annotated[tuple[ModelEntry, ...], NotEmpty] | None = Field(
        None, description="the models that are merged, whole"
    )
    slices: Annotated[tuple[SliceEntry, ...], NotEmpty] | None = Field(
        None, description="instead of models: layers to merge and to stack"
    )
    parameters: Parameters = Field(
        default_factory=dict, description="for all models, and those of the method itself"
    )

    bodies: ClassVar[tuple[str, ...]] = ("models", "slices")

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        given = [key for key in cls.bodies if key in data]
        if len(given) > 1:
            raise FaultsError.one(f"give one of {listed(cls.bodies)}, not several", given[-1])
        return data


class Module(Body):
    """One of mergekit's `modules:`."""


class TokenSource(Strict):
    """The origin of a token's embedding, if it is not a plain model."""

    kind: Literal["model_token", "zero"]
    model: ModelField | None = None
    token: Name | None = None
    token_id: Annotated[int, Field(strict=True, ge=0)] | None = None

    @model_validator(mode="after")
    def _complete(self) -> TokenSource:
        if self.kind == "zero":
            given = [k for k in ("model", "token", "token_id") if getattr(self, k) is not None]
            if given:
                raise FaultsError.one("a zero embedding comes from no model or token", given[0])
            return self
        if self.model is None:
            raise FaultsError.one("model_token needs a `model`")
        if (self.token is None) == (self.token_id is None):
            raise FaultsError.one("model_token needs either `token` or `token_id`")
        return self


def _token_source(raw: object) -> ModelRef | TokenSource:
    if isinstance(raw, TokenSource):
        return raw
    if isinstance(raw, Mapping) and "kind" in raw:
        return TokenSource.model_validate(raw)
    return model_ref(raw)


class TokenEntry(Strict):
    """One of `tokenizer.tokens`; `force` uses the source's embedding even if others have one."""

    source: Annotated[ModelRef | TokenSource, read_by(_token_source, ModelForm)] | None = None
    force: Annotated[bool, Field(strict=True)] = False


def _tokenizer_source(raw: object) -> str | ModelRef:
    return raw if raw in ("union", "base") and isinstance(raw, str) else model_ref(raw)


TokenizerSource = Annotated[str | ModelRef, read_by(_tokenizer_source, ModelForm)]


class TokenizerSettings(Strict):
    """The vocabulary of the result: `union`, `base`, or a model's."""

    source: TokenizerSource = "union"
    tokens: dict[str, TokenEntry] = Field(default_factory=dict)
    pad_to_multiple_of: PositiveInt | None = None


class WrapEntry(Strict):
    """One of `wrap:`: the name of a wrapper, or with its parameters."""

    wrapper: Name
    parameters: Parameters = Field(default_factory=dict)


def _wrap_entry(raw: object) -> object:
    return {"wrapper": raw} if isinstance(raw, str) else raw


Wraps = Annotated[
    tuple[
        Annotated[WrapEntry, BeforeValidator(_wrap_entry, json_schema_input_type=str | WrapEntry)],
        ...,
    ],
    NotEmpty,
    BeforeValidator(
        lambda raw: (raw,) if isinstance(raw, str | Mapping) else raw,
        json_schema_input_type=str | WrapEntry | list[str | WrapEntry],
    ),
]


class RouterSettings(Strict):
    """How routers are merged, if not like all other tensors: another method, or one model's."""

    merge_method: Name | None = None
    parameters: Parameters = Field(default_factory=dict)
    keep: ModelField | None = None

    @model_validator(mode="after")
    def _one_way(self) -> RouterSettings:
        if (self.merge_method is None) == (self.keep is None):
            raise FaultsError.one("give either `merge_method` or `keep`")
        if self.keep is not None and self.parameters:
            raise FaultsError.one("`keep` copies a router and takes no parameters", "parameters")
        return self


def _only_default(raw: object) -> object:
    others = [str(name) for name in raw if name != "default"] if isinstance(raw, Mapping) else []
    if others:
        raise FaultsError.one(
            f"only the module 'default' is supported, not {listed(others)}: models are merged "
            "whole, so write `models:` or `slices:` at the top"
        )
    return raw


Modules = Annotated[dict[str, Module], NotEmpty, BeforeValidator(_only_default)]


def with_repairs(fields: Mapping[str, Repair]) -> Callable[[type[M]], type[M]]:
    """Return a class decorator that adds the block of a repair under each of these names."""

    def decorate(model: type[M]) -> type[M]:
        added: dict[str, Any] = {
            name: (repair.block | None, Field(None, description=repair.block_help))
            for name, repair in fields.items()
        }
        extended = create_model(
            model.__name__, __base__=model, __module__=model.__module__, **added
        )
        extended.__doc__ = model.__doc__
        return extended

    return decorate


@with_repairs({repair.key: repair for repair in REPAIRS})
class RunConfig(Body):
    """A whole config file. Each repair has a block under its key."""

    bodies: ClassVar[tuple[str, ...]] = ("models", "slices", "modules")
    inert: ClassVar[Mapping[str, str]] = {
        "name": "a name for the merge belongs to files of several merges, but this file has one: "
        "remove it"
    }
    blocks: ClassVar[tuple[str, ...]] = ("router", *(repair.key for repair in REPAIRS))

    merge_method: Name = Field(
        ..., description="how models are merged: `moemerge ls methods` lists the methods"
    )
    base_model: ModelField | None = Field(
        None,
        description="the model that task vectors are taken against; lends its config and tokenizer",
    )
    modules: Modules | None = Field(
        None, description="mergekit's modules; only `default` is supported"
    )
    seed: Annotated[int, Field(strict=True, ge=0)] | None = Field(
        None, description="seed of the methods that draw at random (default: 0)"
    )
    dtype: DtypeField | None = Field(
        None,
        description="inputs are rounded to it before the arithmetic, and results unless out_dtype "
        "is given",
    )
    out_dtype: DtypeField | None = Field(None, description="dtype of the result")
    tokenizer_source: TokenizerSource | None = Field(
        None, description="whose vocabulary the result has: base, union or a model"
    )
    tokenizer: TokenizerSettings | None = Field(None, description="the same, token by token")
    chat_template: ChatTemplateField | None = Field(
        None, description="auto, the name of a template, or a Jinja template"
    )
    router: RouterSettings | None = Field(
        None, description="how routers are merged, where not like everything else"
    )
    wrap: Wraps | None = Field(
        None, description="what acts around the method: `moemerge ls wrappers` lists the wrappers"
    )
    tasks: KeptModels | None = Field(
        None, description="what is kept of each model, for `moemerge extract`"
    )
    coefficients: FileName | None = Field(
        None,
        description="a file of coefficients (`moemerge coefficients`): how much of each "
        "model, layer by layer or unit by unit",
    )
    data: NamedTexts | None = Field(
        None, description="text of each model, by the models' names: files, or how to make one"
    )
    statistics: DataFiles | None = Field(
        None, description="files of saved statistics, by the models' names"
    )
    collecting: CollectingBlock | None = Field(
        None, description="settings of statistics that are computed during the merge"
    )

    @property
    def body(self) -> Body:
        """The mapping with `models` or `slices`: this one, or the only module."""
        return self.modules["default"] if self.modules else self

    @property
    def repairs(self) -> dict[Repair, RepairBlock]:
        """The repairs that the config requests, in the order in which they run."""
        blocks = {repair: getattr(self, repair.key) for repair in REPAIRS}
        return {repair: block for repair, block in blocks.items() if block is not None}


def kept_faults(config: RunConfig, schemas: Mapping[str, MethodSchema]) -> Iterator[Fault]:
    """Report keys that a merge with `tasks` cannot have."""
    if config.tasks is None:
        return
    method = schemas.get(config.merge_method)
    if method is not None and method.base is BasePolicy.MEMBER:
        text = f"{method.name!r} takes the base for a model like the others, and masks need it"
        yield Fault(TASKS, f"{text} apart: use 'task_arithmetic'")
    elif config.base_model is None:
        yield Fault(TASKS, "masks are taken against a base_model, and there is none")
    if config.body.slices:
        yield Fault(TASKS, "is for models merged whole, not for slices")
    for key in ("tokenizer", "tokenizer_source"):
        if getattr(config, key) is not None:
            yield Fault((key,), "cannot be changed where models are kept (`tasks`): remove it")
    for repair in config.repairs:
        yield Fault((repair.key,), "changes the merge that `tasks` refer to: remove one of them")
    if config.router is not None and config.router.keep is not None:
        yield Fault(("router", "keep"), "leaves no mask of the routers: remove it, or `tasks`")
