"""The bundled specialists, and problems of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from moemerge.testbed import bundled_set
from moemerge.testbed.tasks import problems


@pytest.fixture(scope="session")
def specialists() -> dict[str, Path]:
    return dict(bundled_set().models)


@pytest.fixture(scope="session")
def sums():
    return problems("math", split="test", count=40, seed=11)
