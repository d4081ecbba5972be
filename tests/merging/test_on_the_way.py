"""Statistics that are computed while the merge is made, and merges that are calibrated after."""

import re
import shutil

import pytest
import torch

import moemerge
import zoo
from collecting import direct
from collecting.cases import token_rows
from merging.gathered import is_linear, open_model, regmean, unit_tensors
from moemerge.config.settings import MergeSettings
from moemerge.errors import ConfigError, DataError, NumericalError, ResourceError
from moemerge.merging import run as merging_run

CPU = MergeSettings(device="cpu")
WORDS = ["sum", "list", "dict", "value", "model", "expert", "router", "code", "math"]


@pytest.fixture(scope="module")
def models(zoo_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("way")
    base = zoo_folder("olmoe")
    for seed, name in enumerate(("math", "code"), 1):
        zoo.tiny_tokenizer(zoo.perturb(base, folder / name, seed, scale=0.3))
        rows = [
            {"text": f"the {word} is {seed} plus {i} of three and one"}
            for i, word in enumerate(WORDS * 2)
        ]
        zoo.write_rows(folder / f"{name}.jsonl", rows)
    return folder


class Looking(zoo.Notes):
    """And which statistics lay in hidden folders of a folder meanwhile."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.seen = folder, set()

    def note(self, message):
        super().note(message)
        self.seen |= {path.name for path in self.folder.glob(".*/*.stats")}


def config(models, method, **more):
    return {
        "merge_method": method,
        "models": [{"model": str(models / name), "name": name} for name in ("math", "code")],
        "data": {name: str(models / f"{name}.jsonl") for name in ("math", "code")},
        **more,
    }


@pytest.mark.parametrize(("method", "kind"), [("regmean", "gram"), ("fisher", "fisher")])
def test_the_same_bytes_as_with_saved_statistics(models, tmp_path, method, kind):
    settings = config(models, method, collecting={"max_length": 8})
    notes = Looking(tmp_path)
    report = moemerge.merge(settings, tmp_path / "way", settings=CPU, progress=notes).to_json()
    assert [note[:19] for note in notes.said] == ["statistics of math:", "statistics of code:"]
    assert all("longer than `max_length`, 8 tokens" in note for note in notes.said)
    assert notes.seen == {f"0.{kind}.stats", f"1.{kind}.stats"}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["way"]
    saved = {name: tmp_path / f"{name}.stats" for name in ("math", "code")}
    for name, file in saved.items():
        moemerge.collect_statistics(
            models / name,
            file,
            data=models / f"{name}.jsonl",
            kind=kind,
            max_length=8,
            device="cpu",
        )
    del settings["data"], settings["collecting"]
    settings["statistics"] = {name: str(file) for name, file in saved.items()}
    again = moemerge.merge(settings, tmp_path / "saved", settings=CPU).to_json()
    zoo.assert_same(tmp_path / "way", tmp_path / "saved")
    assert report["remarks"] == again["remarks"]
    told = report["statistics"]["math"][kind]
    assert told["computed_from"] == [str(models / "math.jsonl")]
    assert told["data_fingerprint"] == again["statistics"]["math"][kind]["data_fingerprint"]
    # one saved, one computed
    mixed = {**settings, "statistics": {"math": str(saved["math"])}, "collecting": {}}
    mixed["collecting"] = {"max_length": 8}
    mixed["data"] = {"code": str(models / "code.jsonl")}
    moemerge.merge(mixed, tmp_path / "mixed", settings=CPU)
    zoo.assert_same(tmp_path / "mixed", tmp_path / "saved")


@pytest.fixture
def others(zoo_folder, tmp_path, models):
    """Two fine-tunes of a family with the tokenizer and the texts of `models`."""

    def build(family):
        for seed, name in enumerate(("math", "code"), 1):
            zoo.tiny_tokenizer(zoo.perturb(zoo_folder(family), tmp_path / name, seed, scale=0.3))
            shutil.copy(models / f"{name}.jsonl", tmp_path)
        return tmp_path

    return build


def rows_of(folder, name):
    return token_rows(folder / name, folder / f"{name}.jsonl")


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "mixtral"])
def test_regmean_from_text_is_what_plain_transformers_give(others, tmp_path, family):
    """Whole models in float64 with hooks, and the formula term by term."""
    folder = others(family)
    moemerge.merge(config(folder, "regmean"), tmp_path / "out", settings=CPU)
    merged = unit_tensors(tmp_path / "out")
    own = [unit_tensors(folder / name) for name in ("math", "code")]
    rows = [rows_of(folder, name) for name in ("math", "code")]
    grams = [direct.grams(folder / n, r) for n, r in zip(("math", "code"), rows, strict=True)]
    lengths = [sum(map(len, r)) for r in rows]
    for key, value in merged.items():
        if key not in grams[0]:
            expected = (own[0][key] + own[1][key]) / 2
        else:
            expected = regmean([w[key] for w in own], [g[key] for g in grams], lengths)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "mixtral"])
def test_fisher_from_text_is_what_plain_transformers_give(others, tmp_path, family):
    folder = others(family)
    moemerge.merge(config(folder, "fisher"), tmp_path / "out", settings=CPU)
    merged = unit_tensors(tmp_path / "out")
    own = [unit_tensors(folder / name) for name in ("math", "code")]
    rows = [rows_of(folder, name) for name in ("math", "code")]
    lengths = [sum(map(len, r)) / len(r) for r in rows]
    found = [
        {key: value / length for key, value in direct.fishers(folder / name, r).items()}
        for name, r, length in zip(("math", "code"), rows, lengths, strict=True)
    ]
    linear = {u.key for u in open_model(tmp_path / "out")[1].units_by_key.values() if is_linear(u)}
    assert len(linear) > 60
    for key in linear:
        floor = 1e-6 * sum(f[key].mean() for f in found) / 2
        shares = [f[key].clamp(min=max(floor, 1e-300)) for f in found]
        expected = sum(f * w[key] for f, w in zip(shares, own, strict=True)) / sum(shares)
        torch.testing.assert_close(merged[key], expected, rtol=1e-5, atol=3e-5, msg=key)


def test_merged_by_regmean_then_calibrated(models, tmp_path):
    settings = config(models, "regmean", calibration={"device": "cpu"})
    report = moemerge.run(settings, tmp_path / "out", settings=CPU)
    assert report.calibration is not None
    assert report.merge.statistics["code"]["gram"]["tokens"] > 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    moemerge.merge(config(models, "regmean"), tmp_path / "merged", settings=CPU)
    merged, out = zoo.tensors(tmp_path / "merged"), zoo.tensors(tmp_path / "out")
    for name, value in merged.items():
        assert torch.equal(value, out[name]) != name.endswith("mlp.gate.weight")


def test_the_disk_for_them_is_checked_first(models, tmp_path, monkeypatch):
    asked = []

    def refuse(out, nbytes):
        asked.append(nbytes)
        raise ResourceError("too full")

    monkeypatch.setattr(merging_run, "require_space", refuse)
    settings = config(models, "regmean")
    notices = moemerge.validate(settings).notices
    told = r"statistics of math, code are computed first, .* about [\d.]+ .?B of disk"
    assert any(re.search(told, notice) for notice in notices)
    for act in (moemerge.merge, moemerge.validate):
        with pytest.raises(ResourceError, match="too full"):
            act(settings, tmp_path / "out", settings=CPU)
    plain = {**settings, "merge_method": "linear", "parameters": {"weight": 1.0}}
    with pytest.raises(ResourceError):
        moemerge.merge(plain, tmp_path / "out", settings=CPU)
    assert asked[0] == asked[1] > asked[2] + 100_000
    assert list(tmp_path.iterdir()) == []


def test_what_fails_on_the_way_leaves_nothing(models, tmp_path):
    settings = config(models, "regmean")
    missing = {**settings, "data": {**settings["data"], "code": str(models / "no.jsonl")}}
    with pytest.raises(DataError, match=r"data 'code': no such file"):
        moemerge.merge(missing, tmp_path / "a" / "out", settings=CPU)
    broken = zoo.perturb(models / "math", tmp_path / "broken", 9)
    with zoo.edited(broken) as tensors:
        tensors["model.norm.weight"][0] = float("nan")
    settings["models"][0]["model"] = str(broken)
    with pytest.raises(NumericalError):
        moemerge.merge(settings, tmp_path / "b" / "out", settings=CPU)
    assert [p.name for p in tmp_path.iterdir()] == ["broken"]


def test_collecting_settings_are_checked(models):
    for wrong, said in (
        ({"kind": "gram"}, "the kind follows from the merge method"),
        ({"max_lenght": 3}, "did you mean 'max_length'"),
        ({"max_length": 0}, "must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=said):
            moemerge.validate(config(models, "regmean", collecting=wrong))
    unused = config(models, "linear", parameters={"weight": 1.0}, collecting={"limit": 3})
    with pytest.raises(ConfigError, match="uses no statistics, so none are collected"):
        moemerge.validate(unused)
