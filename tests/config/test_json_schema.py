"""The schema that editors read: it takes every config that we take, and marks mistakes of form."""

import re
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import moemerge
from moemerge import api
from moemerge.api import config_schema, load_config
from moemerge.config.coefficients import dump_coefficients
from moemerge.config.dump import config_data
from moemerge.config.job_settings import (
    CollectingSettings,
    DiagnosisSettings,
)
from moemerge.config.repair_settings import CalibrationSettings
from moemerge.config.schema import RunConfig
from moemerge.config.settings import MergeSettings
from moemerge.config.text_settings import DataSettings
from moemerge.config.yaml_lines import read_all
from moemerge.errors import ConfigError, UsageError
from moemerge.lab.study.run import study
from moemerge.lab.study.settings import StudySettings

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODELS = [{"model": "a"}, {"model": "b"}]


@pytest.fixture(scope="module")
def schema():
    Draft202012Validator.check_schema(config_schema())
    return Draft202012Validator(config_schema())


def whole_configs():
    """Every config of the examples and the pages."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.yml"))]
    for page in PAGES:
        blocks = re.findall(r"^```yaml\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)
        # A study and a composition hold merges, and are no configs themselves.
        texts += [b for b in blocks if re.search("^merge_method:", b, re.M)]
    return [document.data for text in texts for document in read_all(text, "a config")]


@pytest.mark.parametrize("config", whole_configs())
def test_examples_are_valid_as_written_and_as_resolved(config, schema, tmp_path, monkeypatch):
    schema.validate(config)
    if "coefficients" in config:
        monkeypatch.chdir(tmp_path)
        values = {entry["name"]: {"*": 1.0} for entry in config["models"]}
        Path(config["coefficients"]).write_bytes(dump_coefficients(values, {}))
    loaded = load_config({key: value for key, value in config.items() if key != "name"})
    schema.validate(config_data(loaded.config))
    schema.validate(config_data(loaded.config, tmp_path))


@pytest.mark.parametrize(
    "changes",
    [
        {"calibration": None},
        {"refit": {"parts": "router,attention", "sources": ["a", "b"], "weights": {"a": 2}}},
        {
            "calibration": {
                "layers": 3,
                "holdout": 0.1,
                "data": {"a": ["x.jsonl", "y.jsonl"], "b": "b.jsonl"},
            }
        },
        {"models": [{"model": {"model": {"path": "a"}, "lora": "b"}}, {"model": "b"}]},
        {"parameters": {"weight": [0, 0.5], "normalize": True}},
        {"parameters": {"weight": [{"filter": "mlp", "value": [0, 1]}, {"value": 1}]}},
        {"router": {"keep": "a"}, "tokenizer_source": "union", "dtype": "torch.bfloat16"},
        {"tokenizer": {"source": "a", "tokens": {"<x>": {"source": {"kind": "zero"}}}}},
        {"out_dtype": "float32", "seed": 3},
    ],
)
def test_what_is_accepted_is_valid(changes, schema):
    config = {"merge_method": "linear", "models": MODELS, "parameters": {"weight": 1}, **changes}
    if "calibration" in config or "refit" in config:
        config = {"data": {"a": "a.jsonl", "b": "b.jsonl"}, **config}
    load_config(config)
    schema.validate(config)


@pytest.mark.parametrize(
    "changes",
    [
        {"merge_metod": "ties"},
        {"merge_method": "tiess"},
        {"parameters": {"wieght": 1}},
        {"models": [{"modell": "a"}]},
        {"models": "a"},
        {"dtype": "int64"},
        {"calibration": {"alpha": 2}},
        {"calibration": {"objective": "exactly"}},
        {"calibration": {"layers": {}}},
        {"refit": {"ridge": "some"}},
        {"router": {"merge_method": "nearest"}},
        {"slices": [{"sources": [{"model": "a"}]}], "models": None},
        {"data": {"a": 3}},
    ],
)
def test_mistakes_are_marked(changes, schema):
    config = {"merge_method": "linear", "models": MODELS, **changes}
    assert not schema.is_valid(config)


def test_editors_can_explain_every_key():
    schema = config_schema()
    blocks = [schema, *(schema["$defs"][name] for name in ("CalibrationBlock", "RefitBlock"))]
    silent = [
        k for block in blocks for k, f in block["properties"].items() if "description" not in f
    ]
    assert silent == []
    parameters = schema["$defs"]["Parameters"]["properties"]
    assert "dare_ties" in parameters["density"]["description"]


def test_the_page_on_configs_has_every_key():
    page = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`[^|]*)\|", page, re.M)
    table = set(re.findall(r"`(\w+)`", " ".join(cells)))
    assert table == set(RunConfig.model_fields) - {"modules"}


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (api.merge, MergeSettings),
        (api.validate, MergeSettings),
        (api.run, MergeSettings),
        (api.calibrate, CalibrationSettings),
        (api.diagnose, DiagnosisSettings),
        (api.collect_statistics, CollectingSettings),
        (moemerge.make_data, DataSettings),
    ],
    ids=lambda c: c.__name__,
)
def test_help_lists_every_setting_with_its_default(function, settings):
    shown = function.__signature__.parameters
    assert not any(p.kind is p.VAR_KEYWORD for p in shown.values())
    for name, field in settings.model_fields.items():
        assert shown[name].default == field.default, name


def test_settings_given_twice_are_refused():
    with pytest.raises(Exception, match="as a whole and also one by one: seed"):
        api.validate({}, settings=MergeSettings(), seed=1)
    with pytest.raises(ConfigError, match=r"settings of validate.*\n  sed: unknown key, did you"):
        api.validate({}, sed=1)
    with pytest.raises(UsageError, match=r"study: settings .* one by one: jobs"):
        study({}, "out", settings=StudySettings(), jobs=2)
    with pytest.raises(ConfigError, match="experts: unknown key"):
        api.distill("model", "out", sources={}, data={}, experts={"math": "experts.json"})


def test_wrong_values_are_our_errors_with_every_problem():
    with pytest.raises(ConfigError) as caught:
        CalibrationSettings(alpha=2, layers="x", rtol=0)
    assert str(caught.value).startswith("CalibrationSettings: 3 problems")
    assert "alpha: must be at most 1, not 2" in str(caught.value)
    assert MergeSettings.model_validate({"seed": 3}) == MergeSettings(seed=3)
