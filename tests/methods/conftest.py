import pytest
import torch

import moemerge.methods  # noqa: F401  (registers the methods)
from moemerge.config.parameters import REQUIRED
from moemerge.families.roles import Role
from moemerge.methods.method import METHODS, UnitInfo


def _tensor(x):
    return x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float32)


@pytest.fixture
def merge():
    """merge("ties", [θ_1, θ_2], base=θ_0, params={...} or one mapping a model, **options).

    `statistics` are one UnitStatistics (or None) a model; `remark` gets what the method says.
    """

    def call(
        name,
        tensors,
        *,
        base=None,
        params=None,
        statistics=None,
        key="w",
        role=Role.MLP,
        seed=0,
        remark=lambda kind, facts: None,
        **options,
    ):
        method = METHODS.get(name)
        if not isinstance(params, list):
            params = [params or {}] * len(tensors)
        known = {spec.name: spec for spec in method.schema.parameters}
        assert options.keys() | {k for p in params for k in p} <= known.keys(), "unknown parameter"
        needed = {spec.name for spec in known.values() if spec.default is REQUIRED}
        assert needed <= options.keys() | params[0].keys(), "a parameter is missing"
        unit = UnitInfo(key, role, seed, tuple(f"m{i}" for i in range(len(tensors))), remark=remark)
        base = None if base is None else _tensor(base)
        arguments = method.arguments(params, options, key)
        base = method.base_of(arguments, base)
        statistics = statistics or [None] * len(tensors)
        return method.merge([_tensor(t) for t in tensors], base, arguments, unit, statistics)

    return call
