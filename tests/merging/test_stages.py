"""A config of several merges: the same model as the merges one by one, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import moemerge
import zoo
from moemerge.errors import CheckpointError, ConfigError, MoeMergeError


@pytest.fixture
def file(zoo_folder: Callable[..., Path], tmp_path: Path) -> Path:
    a, b, c = (zoo_folder("olmoe", seed=seed) for seed in range(3))
    path = tmp_path / "stages.yml"
    path.write_text(
        f"""
name: half
merge_method: linear
models: [{{model: {a}, parameters: {{weight: 1}}}}, {{model: {b}, parameters: {{weight: 1}}}}]
---
merge_method: task_arithmetic
base_model: half
models: [{{model: {c}, parameters: {{weight: 0.5}}}}]
"""
    )
    return path


def test_stages_are_the_merges_one_by_one(
    file: Path, zoo_folder: Callable[..., Path], tmp_path: Path
) -> None:
    planned = moemerge.validate(file)
    assert [model.reference for model in planned.models if model.base] == ["half"]
    assert [p.name for p in tmp_path.iterdir()] == ["stages.yml"]
    moemerge.merge(file, tmp_path / "out")
    a, b, c = (zoo.tensors(zoo_folder("olmoe", seed=seed)) for seed in range(3))
    for name, value in zoo.tensors(tmp_path / "out").items():
        half = (a[name] + b[name]) / 2
        torch.testing.assert_close(value, half + 0.5 * (c[name] - half), msg=name)
    assert {p.name for p in tmp_path.iterdir()} == {"stages.yml", "out"}
    for text in ("moemerge_config.yml", "README.md", "moemerge_report.json"):
        assert "partial" not in (tmp_path / "out" / text).read_text(), text
    moemerge.merge(tmp_path / "out" / "moemerge_config.yml", tmp_path / "again")
    again = zoo.tensors(tmp_path / "again")
    assert all(torch.equal(v, again[n]) for n, v in zoo.tensors(tmp_path / "out").items())


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ("base_model: half", "base_model: hlaf", MoeMergeError, "half|hlaf"),
        ("task_arithmetic", "task_arithmetics", ConfigError, "line 6: .*did you mean"),
        ("merge_method: linear", "merge_method: linear\nrefit: {}", MoeMergeError, "refit"),
    ],
)
def test_a_fault_of_the_last_stage_stops_the_first(
    file: Path, tmp_path: Path, old: str, new: str, error: type[Exception], message: str
) -> None:
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(error, match=message):
        moemerge.merge(file, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["stages.yml"]


def test_nothing_is_left_of_a_failed_run(file: Path, tmp_path: Path) -> None:
    """The last merge fails after the first is made: its model holds NaN."""
    bad = tmp_path / "bad"
    model = Path(file.read_text().split("models: [{model: ")[-1].split(",")[0])
    zoo.perturb(model, bad, seed=5)
    with zoo.edited(bad) as tensors:
        tensors["lm_head.weight"][0, 0] = torch.nan
    file.write_text(file.read_text().replace(str(model), str(bad)))
    with pytest.raises((CheckpointError, MoeMergeError), match="NaN"):
        moemerge.merge(file, tmp_path / "out")
    assert {p.name for p in tmp_path.iterdir()} == {"stages.yml", "bad"}


def test_run_repairs_the_last_merge(tmp_path: Path, zoo_folder: Callable[..., Path]) -> None:
    """A source may be an earlier merge. All files name it, not its temporary folder."""
    a, b, c = (
        zoo.tiny_tokenizer(zoo.perturb(zoo_folder("olmoe"), tmp_path / name, seed, scale=0.3))
        for seed, name in enumerate("abc")
    )
    words = zoo._WORDS.split()
    text, file, out = tmp_path / "text.jsonl", tmp_path / "run.yml", tmp_path / "out"
    text.write_text("".join(f'{{"text": "{" ".join(words[i : i + 9])}"}}\n' for i in range(12)))
    file.write_text(
        f"""
name: half
merge_method: linear
models: [{{model: {a}, parameters: {{weight: 1}}}}, {{model: {b}, parameters: {{weight: 1}}}}]
---
merge_method: linear
models:
- {{model: {c}, name: c, parameters: {{weight: 1}}}}
- {{model: half, name: half, parameters: {{weight: 1}}}}
data: {{c: {text}, half: {text}}}
calibration: {{sources: [c, half], device: cpu}}
"""
    )
    report = moemerge.run(file, out, report=tmp_path / "page.html")
    assert report.calibration is not None
    assert report.calibration.sources["half"] == "half"
    written = [out / n for n in ("moemerge_config.yml", "README.md", "moemerge_report.json")]
    for path in (*written, tmp_path / "page.html"):
        assert "partial" not in path.read_text(), path
    assert not list(tmp_path.glob(".*"))
    moemerge.run(out / "moemerge_config.yml", tmp_path / "again")
    again = zoo.tensors(tmp_path / "again")
    assert all(torch.equal(v, again[n]) for n, v in zoo.tensors(out).items())
