import pytest

from lab.tuning.cases import make_base


@pytest.fixture
def base(zoo_folder, tmp_path):
    """A tiny OLMoE in float32, its experts stored one by one."""
    return make_base(zoo_folder("olmoe", num_hidden_layers=2), tmp_path / "base")
