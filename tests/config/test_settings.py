"""Settings classes, their keywords for editors, and what a command line learns of them."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest

from moemerge import api
from moemerge.calibration.settings import CalibrationKeywords, CalibrationSettings
from moemerge.collecting.settings import CollectingKeywords, CollectingSettings
from moemerge.config.settings import MergeKeywords, MergeSettings
from moemerge.data.settings import DataKeywords, DataSettings
from moemerge.diagnosis.settings import DiagnosisKeywords, DiagnosisSettings
from moemerge.errors import ConfigError
from moemerge.experiments.settings import StudyKeywords, StudySettings
from moemerge.tuning.settings import (
    TuningKeywords,
    TuningOutputKeywords,
    TuningOutputSettings,
    TuningSettings,
)

PAIRS = [
    (MergeSettings, MergeKeywords),
    (CalibrationSettings, CalibrationKeywords),
    (DiagnosisSettings, DiagnosisKeywords),
    (CollectingSettings, CollectingKeywords),
    (DataSettings, DataKeywords),
    (TuningSettings, TuningKeywords),
    (StudySettings, StudyKeywords),
    (TuningOutputSettings, TuningOutputKeywords),
]


def alternatives(annotation: Any) -> set[Any]:
    """The members of a union, constraints taken off."""
    if hasattr(annotation, "__metadata__"):
        return alternatives(annotation.__origin__)
    if type(annotation).__name__ in ("UnionType", "_UnionGenericAlias", "Union"):
        return {form for part in get_args(annotation) for form in alternatives(part)}
    return {annotation}


@pytest.mark.parametrize(("settings", "keywords"), PAIRS, ids=lambda c: c.__name__)
def test_keywords_are_the_fields_of_the_settings(settings: Any, keywords: Any) -> None:
    hints = get_type_hints(keywords)
    assert set(hints) == set(settings.model_fields)
    for name, field in settings.model_fields.items():
        assert alternatives(field.annotation) <= alternatives(hints[name]), name
        assert field.description, name


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (api.merge, MergeSettings),
        (api.validate, MergeSettings),
        (api.run, MergeSettings),
        (api.calibrate, CalibrationSettings),
        (api.diagnose, DiagnosisSettings),
        (api.collect_statistics, CollectingSettings),
        (api.make_data, DataSettings),
    ],
    ids=lambda c: c.__name__,
)
def test_help_lists_every_setting_with_its_default(function: Any, settings: Any) -> None:
    shown = function.__signature__.parameters
    assert not any(p.kind is p.VAR_KEYWORD for p in shown.values())
    for name, field in settings.model_fields.items():
        assert shown[name].default == field.default, name


def test_settings_given_twice_are_refused() -> None:
    with pytest.raises(Exception, match="as a whole and also one by one: seed"):
        api.validate({}, settings=MergeSettings(), seed=1)
    with pytest.raises(ConfigError, match=r"settings of validate.*\n  sed: unknown key, did you"):
        api.validate({}, sed=1)  # type: ignore[call-arg]


def test_wrong_values_are_our_errors_with_every_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        CalibrationSettings(alpha=2, layers="x", rtol=0)  # type: ignore[arg-type]
    assert str(caught.value).startswith("CalibrationSettings: 3 problems")
    assert "alpha: must be at most 1, not 2" in str(caught.value)
    assert MergeSettings.model_validate({"seed": 3}) == MergeSettings(seed=3)
