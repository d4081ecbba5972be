"""A config's `tasks:`: what a merge keeps of each model, so that it can be taken out again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from moemerge.config.faults import Fault, FaultsError, Path
from moemerge.config.fields import PositiveInt, Strict
from moemerge.config.parameters import BasePolicy, MethodSchema

Keep = Literal["tall", "emr", "twin"]
PLACE: Path = ("tasks",)
_OWN = {"threshold": "tall", "rank": "twin"}


class KeptTasks(Strict):
    """What is kept of every merged model beside the merge."""

    keep: Keep = Field(..., description="tall or emr: a mask; twin: a low-rank rest")
    threshold: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = Field(
        0.4, description="tall: an element is the model's where |δ_i| > threshold·|Δ - δ_i|"
    )
    rank: PositiveInt = Field(8, description="twin: singular directions that are kept")

    @classmethod
    def prepare(cls, data: dict[str, Any]) -> dict[str, Any]:
        for name, keep in _OWN.items():
            if name in data and data.get("keep") != keep:
                raise FaultsError.one(f"is for `keep: {keep}` alone: remove it", name)
        return data


def kept_faults(config: Any, schemas: Mapping[str, MethodSchema]) -> Iterator[Fault]:
    """What a merge that keeps tasks cannot do besides."""
    if config.tasks is None:
        return
    method = schemas.get(config.merge_method)
    if method is not None and method.base is BasePolicy.MEMBER:
        text = f"{method.name!r} takes the base for a model like the others, and masks need it"
        yield Fault(PLACE, f"{text} apart: use 'task_arithmetic'")
    elif config.base_model is None:
        yield Fault(PLACE, "masks are taken against a base_model, and there is none")
    if config.body.slices:
        yield Fault(PLACE, "is for models merged whole, not for slices")
    for key in ("tokenizer", "tokenizer_source"):
        if getattr(config, key) is not None:
            yield Fault((key,), "cannot be changed where `tasks` are kept: remove it")
    for key in ("calibration", "refit"):
        if getattr(config, key) is not None:
            yield Fault((key,), "changes the merge that `tasks` refer to: remove one of them")
    if config.router is not None and config.router.keep is not None:
        yield Fault(("router", "keep"), "leaves no mask of the routers: remove it, or `tasks`")
