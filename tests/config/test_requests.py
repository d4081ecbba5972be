"""Statistics of data-driven methods: files or text for every model, by name."""

import pytest

from moemerge.api import load_config, wrapper_schemas
from moemerge.config.dump import dump_config
from moemerge.config.models import ModelRef
from moemerge.config.repair_settings import CalibrationSettings
from moemerge.errors import ConfigError

HEAD = """merge_method: regmean
models:
  - {model: ./math, name: math}
  - {model: ./code, name: code}
"""


def needs(load, text):
    found = load(text).statistics
    assert found is not None
    return found


def test_saved_ones(load):
    text = HEAD + "statistics: {math: math.stats, code: [code.stats]}\n"
    found = needs(load, text)
    assert found.needs == {"math": ("gram",), "code": ("gram",)}
    assert found.files == {"math": ("math.stats",), "code": ("code.stats",)}
    assert found.complete
    config = load(text).config
    assert load(dump_config(config)).config == config


def test_text_stands_in_for_the_missing_ones(load):
    data = "data: {math: math.jsonl, code: [a.jsonl, b.jsonl]}\n"
    found = needs(load, HEAD + data)
    assert found.files == {}
    assert found.data == {"math": ("math.jsonl",), "code": ("a.jsonl", "b.jsonl")}
    found = needs(load, HEAD + data + "statistics: {math: math.stats}\n")
    assert found.files == {"math": ("math.stats",)}
    assert found.data == {"code": ("a.jsonl", "b.jsonl")}
    assert not found.complete


def test_a_base_needs_none_and_other_methods_need_none(load):
    text = HEAD + "base_model: ./base\nstatistics: {math: a, code: b}\n"
    assert set(needs(load, text).needs) == {"math", "code"}
    text = HEAD.replace("regmean", "linear") + "parameters: {weight: 1}\n"
    assert load(text).statistics is None


def test_routers_may_need_their_own(load):
    both = "statistics: {math: [a, b], code: [c, d]}\n"
    text = HEAD + "router: {merge_method: fisher}\n" + both
    assert needs(load, text).needs["math"] == ("gram", "fisher")
    text = HEAD.replace("regmean", "linear") + "parameters: {weight: 1}\n" + both
    assert needs(load, text + "router: {merge_method: fisher}\n").needs["code"] == ("fisher",)


WRONG = [
    (
        "",
        [
            "line 1: merge_method: 'regmean' needs the second moments of each model's inputs: give "
            "`statistics` (files made by `moemerge stats`) or `data` (text) for math, code"
        ],
    ),
    (
        "statistics: {math: m.stats}\n",
        [
            "line 5: statistics: no statistics for code, and no `data` to compute them from; "
            "every merged model needs one of them under its own name"
        ],
    ),
    ("data: {math: m.jsonl}\n", ["line 5: data: no statistics for code, and no `data`"]),
    (
        "statistics: {math: m.stats, codes: c.stats}\n",
        ["line 5: statistics.codes: no model is called 'codes', did you mean 'code'?"],
    ),
    (
        "statistics: {math: m, code: c, chat: d}\n",
        ["line 5: statistics.chat: no model is called 'chat'; known: math, code"],
    ),
    (
        "base_model: ./base\nstatistics: {math: m, code: c, base: d}\n",
        ["line 6: statistics.base: 'base' is not merged by 'regmean' and needs none: remove it"],
    ),
    ("statistics: {}\n", ["line 5: statistics: must not be empty"]),
    (
        "statistics: {math: 3, code: []}\n",
        [
            "line 5: statistics.math: expected a list, not 3",
            "line 5: statistics.code: must not be empty",
        ],
    ),
    ("statistic: {math: m}\n", ["line 5: statistic: unknown key, did you mean 'statistics'?"]),
    (
        "calibration: {data: {math: m.jsonl, code: c.jsonl}}\n",
        ["line 1: merge_method: 'regmean' needs the second moments"],
    ),
]


@pytest.mark.parametrize(("text", "expected"), WRONG)
def test_every_problem_is_said(problems, text, expected):
    found = problems(HEAD + text)
    for start in expected:
        assert any(line.startswith(start) for line in found), (start, found)
    if "unknown key" not in expected[0]:
        assert len(found) == len(expected), found


def test_calibration_data_at_the_top_serves_both(problems, load):
    (found,) = problems(HEAD + "calibration: {data: {math: m.jsonl, code: c.jsonl}}\n")
    assert "the data of `calibration` serves both when it is moved to the top" in found
    loaded = load(HEAD + "calibration: {}\ndata: {math: m.jsonl, code: c.jsonl}\n")
    assert loaded.statistics is not None
    assert loaded.repairs[-1].data == loaded.statistics.data


def test_statistics_nobody_uses(problems, load):
    text = HEAD.replace("regmean", "linear") + "parameters: {weight: 1}\nstatistics: {math: m}\n"
    assert problems(text) == ["line 6: statistics: 'linear' uses no statistics: remove them"]
    loaded = load(text, lenient=True)
    assert loaded.config.statistics is None
    assert len(loaded.warnings) == 1


MODELS = """merge_method: ties
base_model: org/base
parameters: {weight: 0.5}
models:
  - {model: org/math@v1, name: math}
  - {model: ./code}
"""


def test_calibration_pairs_models_with_text(load):
    data = "data: {math: m.jsonl, code: [c.jsonl, d.jsonl]}"
    run = load(MODELS + f"calibration: {{{data}, alpha: 0.9}}\n").repairs[-1]
    assert dict(run.sources) == {"math": ModelRef("org/math", "v1"), "code": ModelRef("./code")}
    assert dict(run.data) == {"math": ("m.jsonl",), "code": ("c.jsonl", "d.jsonl")}
    assert isinstance(run.settings, CalibrationSettings)
    assert run.settings.alpha == 0.9
    assert run.settings.model_fields_set == {"alpha"}  # `targets` is chosen unless it is given


@pytest.mark.parametrize("block", ["calibration", "refit"])
def test_the_base_may_be_a_source_when_it_has_text(load, block):
    loaded = load(MODELS + f"{block}: {{data: {{math: m, code: c, base: b}}}}\n")
    run = loaded.repairs[-1]
    assert run.repair.key == block
    assert run.sources["base"] == ModelRef("org/base")


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        ("[math]", {"math": ModelRef("org/math", "v1")}),
        ("[{math: org/other}]", {"math": ModelRef("org/other")}),
    ],
)
def test_a_list_of_sources_replaces_the_merged_models(load, sources, expected):
    text = MODELS + f"calibration: {{data: {{math: m}}, sources: {sources}}}\n"
    run = load(text).repairs[-1]
    assert dict(run.sources) == expected


def test_a_mapping_of_sources_adds_to_the_merged_models(load):
    text = "data: {math: m, code: c, other: o}\ncalibration: {sources: {other: org/other}}\n"
    run = load(MODELS + text).repairs[-1]
    assert list(run.sources) == ["math", "code", "other"]
    assert run.sources["other"] == ModelRef("org/other")
    # The sources of the notice, next to text of the base alone, no longer replace the others.
    text = "calibration: {sources: {base: org/base}, data: {base: b}}\n"
    with pytest.raises(ConfigError, match="no data for math, code"):
        load(MODELS + text)


NAMED = MODELS.replace("org/base", "./olmo-7b")


@pytest.mark.parametrize("place", ["calibration: {{data: {}}}\n", "data: {}\ncalibration: {{}}\n"])
def test_base_is_the_base_model_whatever_its_folder_is_called(load, place):
    run = load(NAMED + place.format("{math: m, code: c, base: b}")).repairs[-1]
    assert run.sources["base"] == ModelRef("./olmo-7b")
    run = load(NAMED + place.format("{math: m, code: c, olmo-7b: b}")).repairs[-1]
    assert run.sources["olmo-7b"] == ModelRef("./olmo-7b")
    with pytest.raises(ConfigError, match="no model is called 'chat'; known: math, code, olmo-7b"):
        load(NAMED + place.format("{math: m, code: c, chat: b}"))


def test_base_can_be_listed_and_have_a_recipe(load):
    recipe = "{file: new.jsonl, prompts: p.jsonl, verify: math}"
    loaded = load(NAMED + f"calibration: {{data: {{base: {recipe}}}, sources: [base]}}\n")
    assert loaded.texts["new.jsonl"].model == ModelRef("./olmo-7b")


def test_text_of_base_serves_statistics_of_the_base():
    wrapper = next(name for name, s in wrapper_schemas().items() if s.statistics is not None)
    loaded = load_config(NAMED + f"wrap: [{{wrapper: {wrapper}}}]\ndata: {{base: b}}\n")
    assert loaded.statistics is not None
    assert loaded.statistics.data == {"olmo-7b": ("b",)}
