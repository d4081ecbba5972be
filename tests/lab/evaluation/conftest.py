"""The bundled specialists, and problems of their own."""

import pytest

from moemerge.lab.testbed import bundled_set
from moemerge.lab.testbed.tasks import problems


@pytest.fixture(scope="session")
def specialists():
    return dict(bundled_set().models)


@pytest.fixture(scope="session")
def sums():
    return problems("math", split="test", count=40, seed=11)
