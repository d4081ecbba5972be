from __future__ import annotations

import pytest
import torch

import moemerge.merging.methods  # noqa: F401  (registers the methods)
from moemerge.architectures.roles import Role
from moemerge.merging.method import METHODS, ModelTensor, UnitInfo


def _tensor(x):
    return x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float32)


@pytest.fixture
def merge():
    """merge("ties", [θ_1, θ_2], base=θ_0, params={...} or one mapping a model, **options)."""

    def call(name, tensors, *, base=None, params=None, key="w", role=Role.MLP, seed=0, **options):
        method = METHODS.get(name)
        if not isinstance(params, list):
            params = [params or {}] * len(tensors)
        inputs = [
            ModelTensor(_tensor(t), method.per_model(**p))
            for t, p in zip(tensors, params, strict=True)
        ]
        return method.function(
            inputs,
            None if base is None else _tensor(base),
            method.options(**options),
            UnitInfo(key, role, seed),
        )

    return call
