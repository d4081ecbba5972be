"""Small method schemas, and the reader's words for a text."""

from dataclasses import replace

import pytest

from moemerge.config.load import check_document
from moemerge.config.parameters import (
    REQUIRED,
    BasePolicy,
    MethodSchema,
    ParameterSpec,
)
from moemerge.config.yaml_lines import read_document
from moemerge.errors import ConfigError


def spec(name, kind, default, per_model, **limits):
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
    name,
    base,
    low,
    high,
    *parameters,
    statistics=None,
):
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
def schemas():
    return {schema.name: schema for schema in ALL}


@pytest.fixture
def load(schemas):
    def read(source, *, lenient=None):
        return check_document(replace(read_document(source), lenient=lenient), schemas=schemas)

    return read


@pytest.fixture
def problems(load):
    """The problems of a text, one string each; empty when it loads."""

    def read(source, *, lenient=None):
        try:
            load(source, lenient=lenient)
        except ConfigError as error:
            return [line.strip() for line in str(error).splitlines()[1:]]
        return []

    return read
