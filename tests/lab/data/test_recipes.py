"""Text that a config says how to make."""

import json

import pytest

import moemerge
import zoo
from moemerge.errors import CheckpointError, ConfigError, DataError, UsageError
from moemerge.lab.testbed import bundled_set
from moemerge.lab.testbed.tasks import problems

RECIPE = {"verify": "exact", "max_new_tokens": 24, "device": "cpu"}


@pytest.fixture
def config(tmp_path):
    models = bundled_set().models
    asked = problems("math", split="test", count=20, seed=5)
    rows = [{"q": p.prompt, "answer": p.answer} for p in asked]
    prompts = zoo.write_rows(tmp_path / "prompts.jsonl", rows)
    texts = [p.prompt + p.answer for p in problems("code", split="test", count=20, seed=5)]
    code = zoo.write_rows(tmp_path / "code.jsonl", ({"text": text} for text in texts))
    recipe = {
        "file": str(tmp_path / "math.jsonl"),
        "prompts": str(prompts),
        "map": {"prompt": "q"},
        **RECIPE,
    }
    return {
        "merge_method": "linear",
        "parameters": {"weight": 0.5},
        "models": [{"model": str(models[name]), "name": name} for name in ("math", "code")],
        "data": {"math": recipe, "code": str(code)},
        "calibration": {"holdout": 0.0, "device": "cpu"},
    }


def test_run_makes_the_text_merges_and_calibrates(config, tmp_path):
    moemerge.validate(config)  # which makes nothing
    made, alone = tmp_path / "math.jsonl", tmp_path / "alone.jsonl"
    assert not made.exists()
    report = moemerge.run(config, tmp_path / "out")
    moemerge.make_data(
        bundled_set().models["math"], alone, prompts=config["data"]["math"]["prompts"],
        map={"prompt": "q"}, **RECIPE,
    )  # fmt: skip
    assert made.read_bytes() == alone.read_bytes()
    assert report.calibration is not None

    made.write_text(made.read_text() + json.dumps({"text": "one more"}) + "\n")
    rows = made.read_bytes()
    moemerge.run(config, tmp_path / "again")  # a file that is there is used as it is
    assert made.read_bytes() == rows

    made.unlink()  # the card's config makes it anew
    moemerge.run(tmp_path / "out" / "moemerge_config.yml", tmp_path / "third")
    assert made.read_bytes() == alone.read_bytes()
    for shard in (tmp_path / "out").glob("*.safetensors"):
        assert shard.read_bytes() == (tmp_path / "third" / shard.name).read_bytes()


def test_text_that_nothing_reads_is_not_made(config, tmp_path):
    assert not any("nothing reads" in word for word in moemerge.validate(config).notices)
    moemerge.merge(config, tmp_path / "merged")
    del config["calibration"]
    moemerge.run(config, tmp_path / "run")
    assert not (tmp_path / "math.jsonl").exists()
    unused = [word for word in moemerge.validate(config).notices if "nothing reads" in word]
    assert [word.partition(":")[0] for word in unused] == ["data.math", "data.code"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"limt": 3}, ConfigError, r"data\.math\.limt: .*did you mean 'limit'"),
        ({"file": None}, ConfigError, r"data\.math\.file"),
        ({"verify": "none"}, UsageError, "no check is given"),
        ({"prompts": "nowhere.jsonl"}, DataError, "nowhere.jsonl"),
        ({"file": "no/such/folder/math.jsonl"}, CheckpointError, "no folder"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_said_before_any_work(
    config, tmp_path, change, error, message
):
    recipe = {**config["data"]["math"], **change}
    config["data"]["math"] = {key: value for key, value in recipe.items() if value is not None}
    with pytest.raises(error, match=message):
        moemerge.run(config, tmp_path / "out")
    with pytest.raises(error, match=message):
        moemerge.validate(config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["code.jsonl", "prompts.jsonl"]
