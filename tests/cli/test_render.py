"""Tables show every number whole: in terminals of any width, in pipes, in poor encodings."""

import json
import os
import random
from dataclasses import replace

import pytest
import typer
from typer.testing import CliRunner

import moemerge
import processes
import zoo
from moemerge.api import list_methods, list_wrappers
from moemerge.cli import console
from moemerge.cli.app import app
from moemerge.cli.console import interruptible, remaining_work
from moemerge.cli.render import NumberTable, merge_report
from moemerge.cli.repair_tables import calibrate_report
from moemerge.cli.routing_table import diagnosis_report
from moemerge.config.schema import REPAIRS
from moemerge.routing.figures import FIGURES
from moemerge.runtime.formatting import Quantity
from terminal import printed, succeed

# --- the parts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [12, 25, 40, 60, 80, 200])
def test_no_cell_is_cut_at_any_width(width):
    rng = random.Random(width)
    table = NumberTable(["name", *(f"two\nlines {n}" for n in range(9))])
    numbers = []
    for row in range(4):
        cells = [f"{rng.random():.{rng.randint(1, 9)}f}→{rng.random():.3g}" for _ in range(9)]
        table.add(f"row {row}", *cells)
        numbers += cells
    text = printed(table, width)
    assert sorted(numbers) == sorted(word for word in text.split() if "→" in word)
    widest = max(map(len, numbers)) + len("name  ")
    assert all(len(line.rstrip()) <= max(width, widest) for line in text.splitlines())
    parts = text.count("name")
    assert parts == 1 if width == 200 else parts > 1


def test_numbers_with_spaces_stay_on_one_line():
    table = NumberTable(["layer", "steps", "residual"])
    table.add("0", "1000 max_steps", "1e-3")
    for width in (5, 20, 80):
        assert "1000 max_steps" in printed(table, width)


def test_words_wrap_so_that_numbers_have_room():
    table = NumberTable(["name", "number", "why"], words=(0, 2))
    table.add("a name of several words", "123456789", "because it is so, and not otherwise")
    text = printed(table, 40)
    assert text.count("name") == 2  # the heading and the name: one part
    assert "123456789" in text
    assert all(len(line.rstrip()) <= 40 for line in text.splitlines())


def test_markup_in_a_cell_is_text():
    table = NumberTable(["[bold]a", "b"], title="[red]title")
    table.add("[/]", "[1]")
    text = printed(table, 80)
    assert [word in text for word in ("[bold]a", "[red]title", "[/]", "[1]")] == [True] * 4


# --- what commands show -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def case(case_of):
    return case_of("olmoe", sources=3, rows=6)


@pytest.fixture(scope="module")
def config(case, tmp_path_factory):
    folder = tmp_path_factory.mktemp("config")
    data = {name: str(path) for name, path in case.data.items()}
    content = zoo.linear(
        case.sources,
        merge_method="task_arithmetic",
        base_model=str(zoo.perturb(case.merged, folder / "base", seed=9)),
        calibration={"data": data, "holdout": 0.3},
    )
    path = folder / "run.yml"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def report(config, tmp_path_factory):
    return moemerge.run(config, tmp_path_factory.mktemp("run") / "out")


def numbers_of(report):
    """Every number of the summary, as it should be printed."""
    assert report.calibration is not None
    rows = [*report.calibration.layers, report.calibration.totals]
    changes = [
        f"{quantity.text(row[f'{figure}_before'][name])}→{quantity.text(row[f'{figure}_after'][name])}"
        for row in rows
        for figure, quantity in (("kl", Quantity.NATS), ("mismatch", Quantity.SHARE))
        for name in report.calibration.sources
    ]
    solves = [(row["iterations"], f"{row['residual']:.1e}") for row in report.calibration.layers]
    inputs = [(model.tensors, model.merged) for model in report.merge.models]
    return changes + [str(one) for pair in (*solves, *inputs) for one in pair]


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("verbose", [False, True])
def test_a_run_of_three_sources_shows_every_number(report, width, verbose):
    assert report.calibration is not None
    text = printed(merge_report(report.merge, verbose=verbose), width)
    text += printed(calibrate_report(report.calibration, verbose=verbose), width)
    words = text.replace(",", " ").split()
    assert [number for number in numbers_of(report) if number not in words] == []
    assert "…" not in text
    if not verbose:  # the name of a router is a word that cannot wrap
        assert all(len(line.rstrip()) <= width for line in text.splitlines())


def test_a_reason_for_a_whole_model_needs_no_names(report):
    model = replace(report.merge.models[0], merged=1, dropped={"a reason": ["one", "two"]})
    for tensors, expected in ((2, "a reason\n"), (3, "a reason: one, two\n")):
        merge = replace(report.merge, models=(replace(model, tensors=tensors),))
        assert printed(merge_report(merge, verbose=False), 200).endswith(expected)


def test_a_pipe_has_no_width(report, config, tmp_path):
    result = CliRunner(env={"COLUMNS": ""}).invoke(app, ["run", str(config), f"{tmp_path}/out"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) > 100
    assert [line for line in lines if line != line.rstrip()] == []
    words = result.stdout.split()
    assert [number for number in numbers_of(report) if number not in words] == []


def test_a_diagnosis_shows_every_figure(case):
    diagnosis = case.diagnose(against=[case.sources["math"]])
    summary = [figure for figure in FIGURES.values() if figure.summary]
    for width in (60, 80, 200):
        words = printed(diagnosis_report(diagnosis, verbose=False), width).split()
        long = printed(diagnosis_report(diagnosis, verbose=True), width).split()
        for total in diagnosis.totals:
            assert {figure.text(total.figures) for figure in summary} <= set(words)
            assert {FIGURES[name].text(total.figures) for name in total.figures} <= set(long)
        for row in diagnosis.layers:
            assert Quantity.SHARE.text(row.mismatch) in words
            main = [f for n, f in FIGURES.items() if n in row.figures and not f.minor]
            main = [figure for figure in main if figure.quantity is not Quantity.DATA]
            assert len(main) > 8
            assert {figure.text(row.figures) for figure in main} <= set(long)


def test_run_prints_every_repair(config, case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a long path would be wrapped
    content = json.loads(config.read_text())
    blocks = {repair.key: {"dtype": "float32", "limit": 12} for repair in REPAIRS}
    blocks["distill"] |= {"steps": 1}
    content |= {"data": content.pop("calibration")["data"], **blocks}
    (tmp_path / "all.yml").write_text(json.dumps(content))
    words = ["run", "all.yml", "out", "-v", "--json", "r.json"]
    result = succeed(*words)
    assert {repair.key for repair in REPAIRS} <= json.loads(
        (tmp_path / "r.json").read_text()
    ).keys()
    # Each table names the folder that remains, as that of the merge does.
    folders = [line.split()[1] for line in result.stdout.splitlines() if line[:7] == "folder "]
    assert folders == ["out"] * (1 + len(REPAIRS))
    document = json.loads((tmp_path / "out/moemerge_report.json").read_text())
    assert {document[repair.key]["output"] for repair in REPAIRS} == {"out"}
    assert "6 of 8 experts kept" in result.stdout


def test_terminals_without_our_characters(report, config, tmp_path):
    def run(*arguments):
        variables = {**os.environ, "PYTHONIOENCODING": "ascii"}
        return processes.python(processes.COMMAND, *arguments, env=variables)

    out = tmp_path / "größe→ü"
    result = run("run", config, out)
    assert result.returncode == 0, result.stderr
    assert (out / "config.json").exists()
    content = json.loads(config.read_text())
    content["models"][0]["name"] = "größe→ü"
    del content["calibration"]
    (tmp_path / "named.yml").write_text(json.dumps(content))
    checked = run("validate", tmp_path / "named.yml", "--json", "-")
    assert "größe→ü" in json.loads(checked.stdout)["inputs"]


# --- what there is to choose from -----------------------------------------------------------------


def written(parameter):
    """A parameter as a config has its default."""
    name, default = parameter["name"], parameter["default"]
    if default == "required":
        return f"{name} (required)"
    if default is None:
        return str(name)
    return f"{name}={str(default).lower() if isinstance(default, bool) else default}"


@pytest.mark.parametrize("what", ["methods", "wrappers"])
def test_ls_shows_every_parameter_with_its_default(what):
    rows = list_methods() if what == "methods" else list_wrappers()
    lines = CliRunner().invoke(app, ["ls", what]).stdout.splitlines()
    names = [row[what.removesuffix("s")] for row in rows]
    begins = {line.split(" ")[0]: at for at, line in enumerate(lines)}
    for name, row in zip(names, rows, strict=True):
        # However wide the terminal is, which was asked before this test: without line breaks.
        ends = [begins[other] for other in names if begins[other] > begins[name]]
        said = " ".join(" ".join(lines[begins[name] : min(ends, default=None)]).split())
        assert row["what_it_does"] in said
        for parameter in [*row.get("per_model", []), *row["options"]]:
            assert written(parameter) in said, name


def run(*amounts, total, unit, quiet=False):
    with console.progress(quiet=quiet) as bar:
        bar.start("reading", total, unit=unit)
        for amount in amounts:
            bar.advance(amount)


def test_a_log_gets_lines(monkeypatch, capsys):
    monkeypatch.setattr(console, "LOG_EVERY", 0.0)
    run(0, 3, 1, total=8, unit="steps")
    run(1_500_000, total=3_000_000, unit="B")
    assert capsys.readouterr().err.splitlines() == [
        "reading: 3 of 8 steps",
        "reading: 4 of 8 steps, 0:00:00 left",
        "reading: 1.5 MB of 3.0 MB",
    ]


def test_a_short_job_leaves_none(capsys):
    run(3, 1, total=8, unit="steps")
    assert capsys.readouterr().err == ""


def test_quiet_is_quiet(monkeypatch, capsys):
    monkeypatch.setattr(console, "LOG_EVERY", 0.0)
    run(3, total=8, unit="steps", quiet=True)
    assert capsys.readouterr().err == ""


def test_only_the_page_is_missing(tmp_path, capsys):
    out = tmp_path / "out"
    left = remaining_work(out)
    out.mkdir()
    with pytest.raises(typer.Exit) as end, interruptible(left):
        raise KeyboardInterrupt
    assert end.value.exit_code == 130
    assert "only figures, page or upload are missing" in capsys.readouterr().err


def test_an_older_folder_is_nothing_that_is_left(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(KeyboardInterrupt), interruptible(remaining_work(out)):
        raise KeyboardInterrupt


def ended(reaction):
    """The command whose modules, while they are imported, react to Ctrl-C like this."""
    code = (
        "import os, signal, sys, types, moemerge.cli\n"
        "class Slow(types.ModuleType):\n"
        "    def __getattr__(self, name):\n"
        "        try: os.kill(os.getpid(), signal.SIGINT)\n"
        f"        except KeyboardInterrupt: {reaction}\n"
        "sys.modules['moemerge.cli.app'] = Slow('moemerge.cli.app')\n"
        "moemerge.cli.main()\n"
    )
    done = processes.interpreter("-c", code)
    return done.returncode, done.stderr


def test_ctrl_c_before_the_command_has_begun():
    assert ended("raise") == (130, "error: interrupted; nothing was left behind by this run\n")


def test_a_library_that_makes_another_error_of_it():
    assert ended("raise RuntimeError('half imported')") == (130, "error: interrupted\n")


def test_errors_that_nobody_foresaw_are_one_sentence_and_a_log(tmp_path):
    code = "import sys, moemerge.cli\nsys.modules['moemerge.cli.app'] = None\nmoemerge.cli.main()"
    done = processes.interpreter("-c", code, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 1
    (log,) = tmp_path.iterdir()
    assert done.stderr == (
        "error: this should not have happened (ModuleNotFoundError); no incomplete output was left "
        f"behind, and {log} has details: please report it\n"
    )
    assert "Traceback" in log.read_text()
    assert log.stat().st_mode & 0o077 == 0  # it may name what is private
