"""`moemerge diagnose` and `moemerge swap-routers` as a user meets them."""

import json
import shlex

import pytest

import terminal
import zoo
from moemerge.cli.routing_table import bar
from moemerge.errors import CheckpointError
from repairs.calibration import cases


@pytest.fixture
def case(case_of):
    return case_of("olmoe", rows=6)


def moemerge(*words, columns=80):
    return terminal.moemerge(*words, columns=columns)


def test_a_bar_for_each_layer_then_totals_and_advice(case):
    result = moemerge("diagnose", case.merged, *case.flags)
    assert result.exit_code == 0, result.output
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert all(len(line) <= 80 for line in lines)
    assert "…" not in result.stdout
    assert lines[0].startswith("The routing")
    heads = next(
        at for at, line in enumerate(lines) if line.split() == ["math", "math", "code", "code"]
    )
    assert lines[heads + 1].split() == ["layer", "mismatch", "KL", "mismatch", "KL"]
    assert [line.split()[0] for line in lines[heads + 2 : heads + 5]] == ["0", "1", "2"]
    assert all(line.count("█") + line.count("▏") for line in lines[heads + 2 : heads + 5])
    assert "• " in result.stdout
    assert "\x1b" not in result.stdout


def test_two_models_side_by_side_fit_a_terminal(case):
    other = case.sources["math"]
    result = moemerge("diagnose", case.merged, "--against", other, "--swaps", *case.flags)
    assert result.exit_code == 0, result.output
    assert result.stdout.count("→") == 6
    assert all(len(line.rstrip()) <= 80 for line in result.stdout.splitlines())
    assert "weights of" in result.stdout
    long = moemerge("diagnose", case.merged, "--against", other, *case.flags, "-v")
    assert "same" in long.stdout
    assert "overlap"[:4] in long.stdout
    assert "repeat" in long.stdout


def test_the_command_in_the_document_repeats_it(case):
    given = ["--layers", "last:2", "--max-length", "9", "--swaps", "--holdout", "0.5"]
    first = moemerge("diagnose", case.merged, *case.flags, *given, "--json", "-")
    document = json.loads(first.stdout)
    program, *words = shlex.split(document["command"])
    assert program == "moemerge"
    again = json.loads(moemerge(*words, "--json", "-").stdout)
    assert again["layers"] == document["layers"]
    assert again["swaps"] == document["swaps"]


def test_what_is_refused_has_an_exit_code_and_one_message(case):
    unpaired = [flag for flag in case.flags if not flag.startswith("--data=code")]
    for given, code, words in (
        (unpaired, 2, "source 'code' has no data"),
        ([*case.flags, "--layers", "40"], 2, "the model has 3 layers"),
        ([*case.flags, "--against", "/nowhere"], 3, "/nowhere"),
        ([*case.flags, "--limit", "0"], 2, "limit"),
        ([*case.flags, "--json", "/nowhere/figures.json"], 2, "there is no folder /nowhere"),
    ):
        result = moemerge("diagnose", case.merged, *given)
        assert result.exit_code == code, result.output
        assert words in result.stderr
        assert "Traceback" not in result.output
        assert result.stdout == ""


def test_bars():
    assert bar(0, 4) == "    "
    assert bar(1, 4) == "████"
    assert bar(0.5, 4) == "██  "
    assert bar(1e-6, 4) == "▏   "
    assert bar(0.53125, 4) == "██▏ "
    assert bar(7.0, 2) == "██"


def test_calibrate_writes_a_page_of_before_and_after(case, tmp_path):
    pytest.importorskip("plotly")
    page, out = tmp_path / "page.html", tmp_path / "out"
    result = moemerge(
        "calibrate", case.merged, out, *case.flags, "--holdout", "0.3", "--report", page
    )
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert str(out) in text
    assert str(case.merged) in text
    assert f"page: {page}" in result.stderr
    assert "held out  KL math" in result.stdout
    assert "…" not in result.stdout
    nowhere = tmp_path / "none" / "page.html"
    result = moemerge("calibrate", case.merged, tmp_path / "b", *case.flags, "--report", nowhere)
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr
    assert not (tmp_path / "b").exists()


def test_a_page_that_fails_leaves_the_calibrated_model(case, tmp_path, monkeypatch):
    pytest.importorskip("plotly")
    page, out = tmp_path / "page.html", tmp_path / "out"

    def full(*_, **__):
        raise CheckpointError(f"{page} cannot be written: No space left on device")

    monkeypatch.setattr("moemerge.diagnosis.page.write_page", full)
    result = moemerge("calibrate", case.merged, out, *case.flags, "--report", page)
    assert result.exit_code == 3
    told = f"{out} is written and whole, but not the page {page}"
    assert told in result.stderr
    assert "Traceback" not in result.output
    assert (out / "config.json").is_file()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_run_writes_a_page_too(case, tmp_path):
    pytest.importorskip("plotly")
    config = tmp_path / "merge.yml"
    base = zoo.tiny_tokenizer(zoo.perturb(case.merged, tmp_path / "base", seed=9))
    merge = zoo.linear(case.sources, merge_method="task_arithmetic", base_model=str(base))
    sources, data = (
        {name: str(path) for name, path in paths.items()} for paths in (case.sources, case.data)
    )
    config.write_text(json.dumps({**merge, "calibration": {"sources": sources, "data": data}}))
    page = tmp_path / "page.html"
    flags = ["--report", page, "--seed", "3", "--layers", "0,1", "--no-measure"]
    result = moemerge("run", config, tmp_path / "out", *flags)
    assert result.exit_code == 0, result.output
    assert "the merge before its repair" in page.read_text()
    words = shlex.join(map(str, ["moemerge", "run", config, tmp_path / "out", *flags]))
    assert words in page.read_text().replace("<span>", "").replace("</span>", "")
    assert f"page: {page}" in result.stderr
    plain = tmp_path / "plain.yml"
    plain.write_text(json.dumps(merge))
    result = moemerge("run", plain, tmp_path / "other", "--report", page)
    assert result.exit_code == 2
    assert "no calibration: or refit: or distill: block" in result.stderr
    assert not (tmp_path / "other").exists()


def test_swap_routers(case, tmp_path):
    out = tmp_path / "out"
    words = ("swap-routers", case.merged, "--from", case.sources["math"], out, "--link")
    result = moemerge(*words, columns=200)  # no long path is wrapped
    assert result.exit_code == 0, result.output
    assert "3 tensors" in result.stdout
    assert len(cases.changed_tensors(case.merged, out)) == 3
    again = moemerge("swap-routers", case.merged, "--from", case.sources["math"], out)
    assert again.exit_code == 3
    assert "exists" in again.stderr
    told = moemerge(
        "swap-routers", case.merged, "--from", case.sources["math"], out, "--overwrite",
        "--layers", "1", "--json", "-",
    )  # fmt: skip
    assert json.loads(told.stdout)["layers"] == [1]
    assert "moemerge swap-routers merged/" in moemerge("swap-routers", "--help").stdout
