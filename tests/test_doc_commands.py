"""Commands, flags and names on the pages of README and docs exist, and lists are complete."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from moemerge.cli.app import app
from moemerge.config.text_settings import DataRecipe
from moemerge.errors import UsageError
from moemerge.lab.benchmarks import find_task, task_names
from moemerge.lab.settings import load_task
from moemerge.lab.study.plan import check_study, load_study
from moemerge.lab.study.settings import StudyConfig

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Programs that pages also name, with flags of their own.
OTHERS = re.compile(
    r"(torchrun|docker|accelerate|pip|make|python|git|srun|pytest|\.venv/bin/|mkdocs|vllm|#SBATCH|scontrol|ruff|benchmarks/)"
)

# Pages that speak of flags of scripts outside of the package.
SCRIPTS = {"reliability", "benchmarks"}


def names_of(page):
    """Return everything a page writes in backticks, outside of code blocks."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    return {" ".join(name.split()) for name in re.findall(r"`([^`]+)`", prose)}


# --- verbs and flags ------------------------------------------------------------------------------


def flags_of(group, *path):
    """The flags of every verb, by its words."""
    found = {}
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            found |= flags_of(command, *path, name)
            continue
        options = (option for parameter in command.params for option in parameter.opts)
        more = (option for parameter in command.params for option in parameter.secondary_opts)
        found[(*path, name)] = {"--help", "-h", *options, *more}
    return found


GROUP = typer.main.get_command(app)
FLAGS = flags_of(GROUP)
COMMON = {option for p in GROUP.params for option in p.opts} | {"--version", "--install-completion"}
KNOWN = COMMON.union(*FLAGS.values())


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_commands_and_flags_of_a_page_exist(page):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    lines = [line for block in blocks for line in block.splitlines()] + spans
    if page.stem in SCRIPTS:
        lines = [line for line in lines if line.startswith("moemerge ")]
    wrong = []
    for line in lines:
        ours = line.split("-m moemerge ")[-1] if "-m moemerge " in line else line
        if ours is line and OTHERS.search(line):
            continue
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", ours.partition(" #")[0]))
        verb = verb_of(ours)
        allowed = KNOWN if verb is None else FLAGS[verb] | COMMON
        wrong += [f"{flag} in {line!r}" for flag in named - allowed]
    assert wrong == []


def test_every_verb_takes_a_plugin():
    assert [verb for verb, flags in FLAGS.items() if "--plugin" not in flags] == []


# What several processes may do together; tests of ranks do it.
SHARED = {"calibrate", "refit", "distill", "diagnose", "stats", "merge", "tune"}


@pytest.mark.parametrize("path", [path for path in FLAGS if path[0] not in SHARED], ids=" ".join)
def test_other_verbs_refuse_several_processes(path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="runs in one process, and torchrun started 2"):
        command_of(path).callback()


@pytest.mark.parametrize(
    ("verbs", "switch"),
    [(("inspect", "ls", "demo"), True), (("merge", "validate", "calibrate", "run"), False)],
)
def test_json_is_a_switch_if_a_command_writes_nothing_else(verbs, switch):
    for path in (path for path in FLAGS if path[0] in verbs):
        (flag,) = [p for p in command_of(path).params if "--json" in p.opts]
        assert flag.is_flag is switch, path


def command_of(path):
    command = GROUP
    for word in path:
        command = command.commands[word]
    return command


def verb_of(line):
    """The verb that a command or an inline phrase begins with, if any."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        words = line.split()
    words = words[1:] if words[:1] == ["moemerge"] else words
    found = [path for path in FLAGS if tuple(words[: len(path)]) == path]
    return found[0] if found else None


# --- lists ----------------------------------------------------------------------------------------


def test_every_package_is_explained():
    source = ROOT / "src" / "moemerge"
    packages = {p.name for p in source.iterdir() if (p / "__init__.py").is_file()}
    modules = {p.stem for p in source.glob("*.py") if not p.stem.startswith("__")}
    assert (packages | modules) - names_of("architecture") == set()


def test_every_key_of_a_study_is_explained():
    text = (ROOT / "docs" / "study.md").read_text(encoding="utf-8")
    rows = " ".join(re.findall(r"^\| (`[^|]*)\|", text, re.M))
    assert set(re.findall(r"`(\w+)`", rows)) == set(StudyConfig.model_fields) | {"extends"}


def test_keys_of_a_recipe_are_flags():
    keys = {f"--{name.replace('_', '-')}" for name in DataRecipe.model_fields} - {"--file"}
    assert keys <= FLAGS["data",]


def test_tasks_are_as_the_table_says():
    rows = re.findall(r"^\| `([\w+]+)` \| (\d+) \|", (ROOT / "docs/evaluate.md").read_text(), re.M)
    assert {name for name, _ in rows} == set(task_names())
    for name, problems in rows:
        task = find_task(name).settings
        assert (task.problems, task.needs_chat_template) == (int(problems), True)


def test_the_study_and_the_task_of_the_pages_are_read(tmp_path):
    for page, key, read in (
        ("study", "title:", lambda path: check_study(load_study(path))),
        ("evaluate", "verify:", load_task),
    ):
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        (block,) = [b for b in re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S) if key in b]
        path = tmp_path / f"{page}.yml"
        path.write_text(block, encoding="utf-8")
        (tmp_path / "mine.jsonl").touch()
        read(path)
