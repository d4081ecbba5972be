import pytest
import torch

import moemerge.methods  # noqa: F401  (registers the methods)
from moemerge.families.roles import Role
from moemerge.methods.method import METHODS, ModelTensor, UnitInfo


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
        known = statistics or [None] * len(tensors)
        inputs = [
            ModelTensor(_tensor(t), method.per_model(**p), f"m{i}", s)
            for i, (t, p, s) in enumerate(zip(tensors, params, known, strict=True))
        ]
        return method.function(
            inputs,
            None if base is None else _tensor(base),
            method.options(**options),
            UnitInfo(key, role, seed, remark=remark),
        )

    return call
