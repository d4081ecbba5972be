from __future__ import annotations

import pytest
from pydantic import ValidationError

from moemerge.calibration.settings import CALIBRATION, CalibrationSettings
from moemerge.config.faults import parse_settings
from moemerge.config.fields import LayerSelection
from moemerge.errors import ConfigError


def test_defaults_are_those_of_the_paper() -> None:
    settings = CalibrationSettings()
    assert settings.alpha == 0.9
    assert settings.gamma is None
    assert settings.rtol == 1e-6
    assert settings.max_steps == 1000
    assert settings.layers == LayerSelection("all")
    assert settings.curvature == "full"
    assert settings.targets == "merged-features"


def test_every_setting_is_explained() -> None:
    for name, info in CALIBRATION.block.model_fields.items():
        assert info.description, name


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError):
        CalibrationSettings().alpha = 0.5  # type: ignore[misc]


def test_gamma_unsets_alpha() -> None:
    assert parse_settings(CalibrationSettings, {"gamma": 0.5}, "flags").alpha is None


def test_values_from_python_are_checked_in_our_words() -> None:
    wrong = {"alpha": 2, "layers": "x", "objektive": "exact", "limit": 0}
    with pytest.raises(ConfigError) as caught:
        parse_settings(CalibrationSettings, wrong, "calibrate")
    lines = str(caught.value).splitlines()
    assert lines[0] == "calibrate: 4 problems"
    assert sorted(line.split(":")[0].strip() for line in lines[1:]) == [
        "alpha",
        "layers",
        "limit",
        "objektive",
    ]
    assert "did you mean 'objective'?" in str(caught.value)


def test_block_gives_its_settings() -> None:
    block = parse_settings(CALIBRATION.block, {"data": {"a": "f"}, "layers": "last:2"}, "x")
    settings = block.narrowed(CALIBRATION.settings)
    assert settings == CalibrationSettings(layers=LayerSelection("last:2"))
    assert block.data == {"a": ("f",)}
