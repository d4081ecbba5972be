"""Study files: what is read, what is refused and on which line, files laid over each other."""

import pytest

from moemerge.config.models import ModelRef
from moemerge.errors import ConfigError
from moemerge.lab.experiments.study_file import load_study, overlaid, parse_overrides

STUDY = """
base: org/base
sources: {math: ./math, code: ./code}
data: {math: math.jsonl, code: code.jsonl}
merges:
  TIES: {merge_method: ties}
repairs:
  control: {routers: average}
  HARC: {calibrate: {alpha: 0.5}}
  HARC, tuned: {tune: {preset: paper}, after: HARC}
evaluate: {tasks: gsm8k, samples: 4}
"""


def faults(text):
    with pytest.raises(ConfigError) as error:
        load_study(text)
    return str(error.value)


def test_what_a_study_says():
    config = load_study(STUDY).config
    assert config.sources == {"math": ModelRef("./math"), "code": ModelRef("./code")}
    assert config.repairs["HARC"].calibrate.alpha == 0.5
    assert config.repairs["HARC"].kind == "calibrate"
    assert config.evaluate.tasks == ("gsm8k",)
    assert config.evaluate.settings.samples == 4
    assert config.diagnose is None
    assert config.keep == "results"


def test_all_faults_come_at_once_with_their_lines():
    text = STUDY.replace("alpha: 0.5", "alpha: 5").replace("samples: 4", "sample: 4")
    said = faults(text + "tabels: {}\n")
    assert "3 problems" in said
    assert "line 9: repairs.HARC.calibrate.alpha: must be at most 1, not 5" in said
    assert "line 11: evaluate.sample: unknown key, did you mean 'samples'?" in said
    assert "line 12: tabels: unknown key, did you mean 'tables'?" in said


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("data: {math", "data: {maths", "no source is called 'maths', did you mean 'math'?"),
        ("after: HARC", "after: HRC", "no repair is called 'HRC', did you mean 'HARC'?"),
        ("routers: average", "routers: averages", "no source is called 'averages'"),
        ("code: code.jsonl}", "}", "no text of code"),
        ("{routers: average}", "{}", "give one of routers, prune, calibrate, refit, distill, tune"),
        ("{calibrate: {alpha: 0.5}}", "{calibrate: {}, after: 'HARC, tuned'}", "from itself"),
        ("base: org/base\n", "", "known: average, math, code"),
        ("sources: {math", "sources: {base: ./b, math", "the base has its own key"),
        ("math: ./math", "math: {tune: {}}", "is missing: the rows to learn"),
        ("{merge_method: ties}", "ties", "expected a merge"),
    ],
)
def test_what_is_refused(old, new, words):
    text = STUDY.replace("routers: average", "routers: base") if "known" in words else STUDY
    assert old in text
    assert words in faults(text.replace(old, new))


def test_tables_speak_of_what_there_is():
    tables = (
        "tables: {one: {merges: [TIS], repairs: [HARC], compare: [[HARC, as merged], [x, HARC]]}}\n"
    )
    said = faults(STUDY + tables)
    assert "tables.one.merges[0]: no merge is called 'TIS', did you mean 'TIES'?" in said
    assert "tables.one.compare[1][0]: no repair is called 'x'" in said


def test_mappings_are_laid_over_each_other_and_null_takes_away():
    below = {"a": {"x": 1, "y": 2}, "b": [1, 2], "c": 3}
    assert overlaid(below, {"a": {"y": 5, "z": 6}, "b": [7], "c": None, "d": None}) == {
        "a": {"x": 1, "y": 5, "z": 6},
        "b": [7],
    }
    assert parse_overrides(["evaluate.limit=10", "evaluate.tasks=[a, b]", "keep=models"]) == {
        "evaluate": {"limit": 10, "tasks": ["a", "b"]},
        "keep": "models",
    }
    with pytest.raises(ConfigError, match=r"KEY\.KEY=VALUE"):
        parse_overrides(["limit"])


def test_a_file_extends_others_and_faults_name_the_right_one(tmp_path):
    (tmp_path / "whole.yml").write_text(STUDY)
    (tmp_path / "few.yml").write_text("evaluate: {samples: 1}\nrepairs: {control: null}\n")
    top = tmp_path / "top.yml"
    top.write_text("extends: [whole.yml, few.yml]\nevaluate: {limit: 7}\n")
    config = load_study(top, {"evaluate": {"seed": 3}}).config
    assert (config.evaluate.samples, config.evaluate.limit, config.evaluate.seed) == (1, 7, 3)
    assert "control" not in config.repairs
    (tmp_path / "few.yml").write_text("# two\nevaluate: {samples: 0}\n")
    with pytest.raises(ConfigError, match=r"few\.yml, line 2: evaluate\.samples: must be at least"):
        load_study(top)
    with pytest.raises(ConfigError, match=r"few\.yml, line 2: evaluate\.samples"):
        load_study(tmp_path / "few.yml", {"title": "one file, and a value over it"})
    top.write_text("extends: top.yml\n")
    with pytest.raises(ConfigError, match="end somewhere"):
        load_study(top)
    top.write_text("extends: gone.yml\n")
    with pytest.raises(ConfigError, match="cannot read"):
        load_study(top)
