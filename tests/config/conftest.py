"""Small method schemas, and the reader's words for a text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from moemerge.config.load import LoadedConfig, load_config
from moemerge.config.parameters import (
    REQUIRED,
    BasePolicy,
    MethodSchema,
    ParameterSpec,
    StatisticsKind,
)
from moemerge.errors import ConfigError


def spec(name: str, kind: type, default: Any, per_model: bool, **limits: Any) -> ParameterSpec:
    return ParameterSpec(name, kind, default, per_model, f"help of {name}", **limits)


WEIGHT = spec("weight", float, REQUIRED, True)
DENSITY = spec("density", float, 1.0, True, minimum=0, maximum=1)
NORMALIZE = spec("normalize", bool, True, False)
LAMBDA = spec("lambda", float, 1.0, False)
STEPS = spec("steps", int, 300, False, minimum=1)
SOLVER = spec("solver", str, "adam", False, choices=("adam", "exact"))
T = spec("t", float, REQUIRED, False, minimum=0, maximum=1)
SCALE = spec("scale", float, None, True)
FACTOR = spec("factor", float, 0.9, False, minimum=0, maximum=1)
SHARE = spec("weight", float, 1.0, True, minimum=0)


def method(
    name: str,
    base: BasePolicy,
    low: int,
    high: int | None,
    *parameters: ParameterSpec,
    statistics: StatisticsKind | None = None,
) -> MethodSchema:
    return MethodSchema(name, f"summary of {name}", base, low, high, parameters, statistics)


ALL = (
    method("linear", BasePolicy.MEMBER, 1, None, WEIGHT, NORMALIZE),
    method("ties", BasePolicy.REQUIRED, 1, None, WEIGHT, DENSITY, NORMALIZE, LAMBDA),
    method("slerp", BasePolicy.REQUIRED, 1, 1, T),
    method("nuslerp", BasePolicy.OPTIONAL, 2, 2, WEIGHT),
    method("model_stock", BasePolicy.REQUIRED, 2, None),
    method("passthrough", BasePolicy.MEMBER, 1, 1, SCALE),
    method("wudi", BasePolicy.REQUIRED, 1, None, STEPS, SOLVER),
    method("regmean", BasePolicy.DONOR, 1, None, SHARE, FACTOR, statistics="gram"),
    method("fisher", BasePolicy.DONOR, 1, None, SHARE, statistics="fisher"),
)


@pytest.fixture
def schemas() -> dict[str, MethodSchema]:
    return {schema.name: schema for schema in ALL}


@pytest.fixture
def load(schemas: dict[str, MethodSchema]) -> Callable[..., LoadedConfig]:
    def read(source: Any, *, lenient: bool = False) -> LoadedConfig:
        return load_config(source, schemas=schemas, lenient=lenient)

    return read


@pytest.fixture
def problems(load: Callable[..., LoadedConfig]) -> Callable[..., list[str]]:
    """The problems of a text, one string each; empty when it loads."""

    def read(source: Any, *, lenient: bool = False) -> list[str]:
        try:
            load(source, lenient=lenient)
        except ConfigError as error:
            return [line.strip() for line in str(error).splitlines()[1:]]
        return []

    return read
