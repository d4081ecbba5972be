from __future__ import annotations

import pytest

from moemerge.config.fields import LayerSelection
from moemerge.errors import UsageError


@pytest.mark.parametrize(
    ("value", "layers"),
    [
        ("all", (0, 1, 2, 3, 4, 5)),
        ("last:2", (4, 5)),
        ("last:6", (0, 1, 2, 3, 4, 5)),
        ("2-4", (2, 3, 4)),
        ("3", (3,)),
        (3, (3,)),
        ("0, 2, 4-5", (0, 2, 4, 5)),
        ([5, "0-1", 0], (0, 1, 5)),
    ],
)
def test_selects(value: object, layers: tuple[int, ...]) -> None:
    selection = LayerSelection.parse(value)
    assert selection.resolve(6) == layers
    assert LayerSelection.parse(str(selection)) == selection


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("last:0", "selects none"),
        ("5-2", "runs backwards"),
        ("first:2", "cannot read 'first:2'"),
        ("", "cannot read ''"),
        ("1,,2", "cannot read ''"),
        ("-1", "cannot read '-1'"),
        (True, "not True"),
        (1.5, "not 1.5"),
        ([], "cannot read"),
    ],
)
def test_refuses_what_names_no_layer(value: object, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        LayerSelection.parse(value)
    assert said in str(caught.value)


@pytest.mark.parametrize("value", ["last:7", "4-6", "6", "0,9"])
def test_layers_beyond_the_model_are_refused_with_its_size(value: str) -> None:
    with pytest.raises(UsageError, match="6 layers, 0 to 5"):
        LayerSelection.parse(value).resolve(6)
