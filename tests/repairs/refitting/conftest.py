import pytest

from repairs.refitting.cases import make_case


@pytest.fixture(scope="module")
def case(zoo_folder, tmp_path_factory):
    base = zoo_folder("olmoe", num_hidden_layers=2)
    return make_case(base, tmp_path_factory.mktemp("case"), rows=30, scale=0.1)
