"""Flags made from settings, help as a user reads it, and messages that name flags."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner

import moemerge
from moemerge.cli.app import app
from moemerge.cli.console import in_flags
from moemerge.cli.flags import ADVANCED, FEW, given, verb
from moemerge.config.fields import AutoOrPositive, Strict
from moemerge.config.job_settings import CollectingSettings, DiagnosisSettings
from moemerge.config.repair_settings import CalibrationSettings
from moemerge.config.settings import MergeSettings, PlanSettings
from moemerge.errors import ConfigError, UsageError


class Knobs(Strict):
    ridge: AutoOrPositive = Field("auto", description="strength")
    steps: AutoOrPositive = Field("auto", description="steps (auto: two epochs)")
    count: int | None = Field(None, description="most of them (default: all)")
    parts: tuple[str, ...] = Field((), description="parts")
    loud: bool = Field(True, description="say more")
    dry: bool = Field(False, description="do nothing")
    mode: Literal["one", "two"] = Field("one", description="way")
    out_size: str = Field("5GB", description="size")


@dataclass(frozen=True)
class Group:
    first: Annotated[int, typer.Option(help="one")] = 1


def outcome(*args):
    seen = {}

    def tried(knobs, data, group):
        seen.update(given(knobs), knobs=knobs, data=data, group=group)

    # `eval_str` reads annotations in the module, where local names are not.
    tried.__annotations__ = {"knobs": Knobs, "data": DATA, "group": Group}
    tool = typer.Typer()
    verb("  tool --help", of=tool)(tried)
    result = CliRunner().invoke(tool, list(args))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return {**seen, "help": result.output}


DATA = Annotated[dict[str, list[str]], typer.Option(metavar="NAME=FILE")]


def test_every_kind_of_field_becomes_a_flag():
    seen = outcome(
        *shlex.split(
            "--ridge 0.5 --count 3 --parts a --parts b --no-loud --dry --mode two --out-size 2GB "
            "--data m=1 --data m=2 --first 7"
        )
    )
    wanted = Knobs(
        ridge=0.5, count=3, parts=("a", "b"), loud=False, dry=True, mode="two", out_size="2GB"
    )
    assert seen["knobs"] == wanted
    assert seen["data"] == {"m": ["1", "2"]}
    assert seen["group"] == Group(7)


def test_what_is_not_given_keeps_its_default_and_is_known_not_to_be():
    seen = outcome("--data", "a=b", "--ridge", "auto")
    assert seen["knobs"] == Knobs()
    assert {name for name in Knobs.model_fields if name in seen} == {"ridge"}


def test_wrong_values_are_named_by_their_flags():
    with pytest.raises(ConfigError) as caught:
        outcome("--data", "a=b", "--mode", "twoo", "--ridge", "-1")
    assert "--mode: must be one of one, two, not 'twoo', did you mean 'two'?" in str(caught.value)
    assert "--ridge: expected auto, or a number above 0 and at most 1e+30, not -1" in str(
        caught.value
    )
    with pytest.raises(UsageError, match="expected NAME=VALUE"):
        outcome("--data", "a")


def test_help_tells_default_choices_and_no_type_of_switches():
    text = " ".join(outcome("--help")["help"].replace("│", " ").split())
    assert "--ridge X|auto Strength: auto or a number (default: auto)." in text
    assert "--steps X|auto Steps (default: auto, two epochs)." in text
    assert "Way: one or two (default: one)." in text
    assert "Most of them (default: all)." in text
    assert "--loud --no-loud Say more (default: on)." in text
    assert "bool" not in text.lower()


def commands(node, path=()):
    """Every verb by its words."""
    inner = getattr(node, "commands", None)
    if inner is None:
        return {path: node}
    return {k: v for name, c in inner.items() for k, v in commands(c, (*path, name)).items()}


VERBS = commands(typer.main.get_command(app))


@pytest.mark.parametrize(
    ("verb", "settings"),
    [
        ("merge", MergeSettings),
        ("validate", PlanSettings),
        ("run", MergeSettings),
        ("run", CalibrationSettings),
        ("calibrate", CalibrationSettings),
        ("diagnose", DiagnosisSettings),
        ("stats", CollectingSettings),
    ],
)
def test_every_setting_is_a_flag_with_its_own_words(verb, settings):
    by_name = {option.name: option for option in VERBS[verb,].params}
    for name, info in settings.model_fields.items():
        option = by_name[name]
        assert option.opts == [f"--{name.replace('_', '-')}"]
        words = option.help.replace("(default: auto, ", "(auto: ")
        assert words[1:].startswith(info.description[1:]) or verb == "run"


def test_what_is_only_checked_replaces_nothing():
    """A flag that would do nothing is not offered; --overwrite is about the report of --json."""
    offered = {option.name for option in VERBS["validate",].params}
    assert set(MergeSettings.model_fields) - offered == {"allow_nonfinite"}


def test_the_list_of_commands_shows_no_type_of_switches():
    result = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).invoke(app, ["-h"])
    assert "bool" not in result.output
    assert max(map(len, result.output.splitlines())) <= 80


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_examples_survive_copying_from_a_narrow_terminal(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_methods.py").touch()  # which an example names
    monkeypatch.setitem(sys.modules, "my_methods", None)
    monkeypatch.delitem(sys.modules, "my_methods")
    result = CliRunner(env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).invoke(app, [*path, "--help"])
    assert result.exit_code == 0
    assert "<bool>" not in result.output
    _, _, examples = result.output.partition("Examples:\n")
    assert max(map(len, result.output.splitlines())) <= 80
    lines = examples.replace("\\\n", " ").strip().splitlines()
    assert lines
    for line in lines:
        words = shlex.split(line.partition(" > ")[0])
        assert words[: len(path) + 1] == ["moemerge", *path], line
        # Parsed as the shell would hand it over; unknown flags or missing arguments raise.
        VERBS[path].make_context(" ".join(path), words[len(path) + 1 :])


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("cal", {"calibrate"}),
        ("calibrate --obj", {"--objective"}),
        ("calibrate --objective ", {"quadratic", "exact"}),
        ("ls ", {"methods", "wrappers", "architectures"}),
    ],
)
def test_shells_complete_verbs_flags_and_words(typed, offered):
    words = f"moemerge {typed}"
    variables = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    result = CliRunner(env={"_MOEMERGE_COMPLETE": "complete_bash", **variables}).invoke(
        app, prog_name="moemerge"
    )
    assert set(result.output.split()) == offered


COMMANDS = typer.main.get_command(app).commands


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_the_common_flags_first(name):
    options = [p for p in COMMANDS[name].params if p.opts[0].startswith("-")]
    first = [p.opts[-1] for p in options if p.rich_help_panel is None]
    assert len(first) <= FEW
    if len(options) > FEW:
        assert len(first) >= 5
        assert {p.rich_help_panel for p in options} == {None, ADVANCED}
        assert not {"--plugin", "--json", "--quiet", "--verbose"} & set(first)
        assert {p.opts[-1] for p in options if p.required} <= set(first)
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "100"}).output
        assert shown.index("─ Options") < shown.index(f"─ {ADVANCED}")


def test_common_names_fields():
    def classes(one):
        return [one, *(below for own in one.__subclasses__() for below in classes(own))]

    found = {one: set(one.common.split()) - set(one.model_fields) for one in classes(Strict)}
    assert not {one.__name__: names for one, names in found.items() if names}


@pytest.mark.parametrize(
    ("python", "flags"),
    [
        ('use `offload="disk"`.', "use --offload disk."),
        ("`ridge=0.1`", "--ridge 0.1"),
        ("`overwrite=True`", "--overwrite"),
        ("`swaps=False`", "--no-swaps"),
        ('`sources={"base": "org/x"}`', "--source base=org/x"),
        ('`data={**data, "base": "b.jsonl"}`', "--data base=b.jsonl"),
        ("`sources={A: MODEL, B: OTHER}`", "--source A=MODEL --source B=OTHER"),
        ("`data=FILE.jsonl`", "--data FILE.jsonl"),
        ("`models` and `linear` are no settings", "`models` and `linear` are no settings"),
    ],
)
def test_settings_in_messages_are_flags(python, flags):
    assert in_flags(python) == flags


def test_one_error_in_both_languages(zoo_folder, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    (tmp_path / "a.jsonl").write_text('{"text": "1 2 3"}\n')
    model = str(zoo_folder("olmoe"))
    with pytest.raises(moemerge.CheckpointError, match="overwrite=True") as raised:
        moemerge.calibrate(
            model, tmp_path / "out", sources={"a": model}, data={"a": tmp_path / "a.jsonl"}
        )
    assert "--" not in str(raised.value)
    words = [model, str(tmp_path / "out"), f"--source=a={model}", f"--data=a={tmp_path}/a.jsonl"]
    result = CliRunner().invoke(app, ["calibrate", *words])
    assert "allow it: --overwrite" in result.output
