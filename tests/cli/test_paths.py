"""No output of a command is an input, is inside one, or replaces a file that is not ours."""

import hashlib
import json
import os
from pathlib import Path

import pytest

import zoo
from terminal import moemerge


@pytest.fixture
def here(zoo_folder, tmp_path, monkeypatch):
    """A folder with two models, text, a plugin and a config; the current folder."""
    base = zoo_folder("olmoe")
    for seed, name in enumerate(("a", "b")):
        zoo.tiny_tokenizer(zoo.perturb(base, tmp_path / name, seed))
    (tmp_path / "t.jsonl").write_text('{"text": "one plus two is three"}\n' * 3)
    (tmp_path / "p.py").write_text("import moemerge\n")
    (tmp_path / "c.yml").write_text(
        "merge_method: linear\nmodels:\n- {model: a, parameters: {weight: 1}}\n"
        "- {model: b, parameters: {weight: 1}}\n"
    )
    (tmp_path / "foreign.json").write_text("{}")
    os.link(tmp_path / "b" / "config.json", tmp_path / "linked.json")
    (tmp_path / "soft.json").symlink_to(tmp_path / "a" / "config.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def state(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


SOURCES = "--source a=a --data a=t.jsonl --source b=b --data b=t.jsonl"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("merge c.yml out --json a/config.json", "inside the input a"),
        ("merge c.yml out --json a/model.safetensors", "inside the input a"),
        ("merge c.yml out --json a/new.json", "inside the input a"),
        ("merge c.yml out --json c.yml", "also an input"),
        ("merge c.yml out --json linked.json", "inside the input b"),
        ("merge c.yml out --json soft.json", "inside the input a"),
        ("merge c.yml out --json p.py --plugin p.py", "also an input"),
        ("merge c.yml out --json foreign.json", "moemerge has not written it"),
        ("merge c.yml a", "is the input folder"),
        ("validate c.yml --json t.jsonl", "moemerge has not written it"),
        (f"refit a out {SOURCES} --json b/model.safetensors", "inside the input b"),
        (f"refit a out {SOURCES} --report b/config.json", "inside the input b"),
        (f"calibrate a out {SOURCES} --json t.jsonl", "also an input"),
        (f"calibrate a out {SOURCES} --report foreign.json", "moemerge has not written it"),
        (f"diagnose a {SOURCES} --json a/config.json", "inside the input a"),
        (f"diagnose a {SOURCES} --report t.jsonl", "also an input"),
        (f"diagnose a {SOURCES} --report r.x --json r.x", "are both r.x"),
        ("evaluate a --task t.yml --report a/config.json --out e", "inside the input a"),
        ("evaluate a --task gsm8k --data gsm8k=t.jsonl --out a", "is also an input"),
        ("evaluate a --task gsm8k --data gsm8k=t.jsonl --out e --json e/results.json", "both"),
        ("data a p.jsonl --text t.jsonl --json t.jsonl", "also an input"),
        ("data a t.jsonl --text t.jsonl", "also an input"),
        ("data a o.jsonl --prompts t.jsonl --completions t.jsonl --keep all", "also an input"),
        ("data a o.jsonl --prompts t.jsonl --completions o.jsonl --keep all", "both"),
        ("data a foreign.json --text t.jsonl", "moemerge has not written it"),
        ("stats a a/model.safetensors --data t.jsonl", "inside the input a"),
        ("stats a t.jsonl --data t.jsonl", "also an input"),
        ("stats a foreign.json --data t.jsonl", "moemerge has not written it"),
        ("coefficients acm c.yml c.yml --data a=t.jsonl --data b=t.jsonl", "also an input"),
        ("swap-routers a --from b out --json b/config.json", "inside the input b"),
        ("study c.yml a", "is also an input"),
    ],
)
def test_inputs_and_foreign_files_stay(here, command, words):
    before = state(here)
    result = moemerge(*command.split(), "--overwrite")
    assert result.exit_code in (2, 3), result.output
    assert words in result.stderr
    assert state(here) == before


def test_a_report_is_replaced_only_with_overwrite(here):
    report, page = here / "r.json", here / "page.html"
    command = ["diagnose", "a", *SOURCES.split(), "--device", "cpu"]
    for path, flag in ((report, "--json"), (page, "--report")):
        assert moemerge(*command, flag, path, "-q").exit_code == 0
        before = path.read_bytes()
        refused = moemerge(*command, flag, path)
        assert refused.exit_code == 3
        assert "--overwrite" in refused.stderr
        assert path.read_bytes() == before
        again = moemerge(*command, flag, path, "--overwrite", "-q")
        assert again.exit_code == 0, again.output
    assert json.loads(report.read_text())["moemerge"]


def test_statistics_rows_and_coefficients_are_known_as_ours(here):
    for command in (
        ["stats", "a", "a.stats", "--data", "t.jsonl", "--device", "cpu"],
        ["data", "a", "o.jsonl", "--text", "t.jsonl"],
        ["data", "a", "o.jsonl.gz", "--text", "t.jsonl"],
    ):
        for words in ([], ["--overwrite"]):
            result = moemerge(*command, *words, "-q")
            assert result.exit_code == 0, result.output


def test_a_link_is_replaced_and_its_target_stays(here):
    target = here / "target.json"
    target.write_text('{"moemerge": "0"}')
    (here / "link.json").symlink_to(target)
    result = moemerge("validate", "c.yml", "--json", "link.json", "--overwrite", "-q")
    assert result.exit_code == 0, result.output
    assert target.read_text() == '{"moemerge": "0"}'
    assert not (here / "link.json").is_symlink()


def test_a_config_inside_out_is_not_deleted_with_it(here):
    assert moemerge("merge", "c.yml", "out", "-q").exit_code == 0
    config = Path("out/moemerge_config.yml")
    result = moemerge("merge", config, "out", "--overwrite")
    assert result.exit_code == 2
    assert "is inside the output" in result.stderr
    assert config.exists()
    inside = moemerge("merge", "c.yml", "out", "--overwrite", "--json", "out/report.json")
    assert "inside the output out" in inside.stderr


@pytest.mark.parametrize("command", ["merge c.yml", "swap-routers a --from b", "stats a"])
def test_a_name_that_is_not_utf8_is_refused_first(here, command):
    name = os.fsdecode(b"out\xff")
    more = ["--data", "t.jsonl"] if command.startswith("stats") else []
    before = state(here)
    result = moemerge(*command.split(), name, *more)
    assert result.exit_code == 3, result.output
    assert "is not UTF-8" in result.stderr
    assert state(here) == before


def test_a_report_that_cannot_be_written_is_named(here):
    failed = moemerge("merge", "c.yml", "out", "--json", "/dev/full")
    assert failed.exit_code != 0
    assert "only this report is missing" in failed.output
    assert moemerge("inspect", "out", "--verify").exit_code == 0
