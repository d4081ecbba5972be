"""Sentences of README and docs, held against what they speak of: flags, defaults, rooms, lists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from pydantic import BaseModel

from moemerge.api import list_methods, list_wrappers
from moemerge.cli.app import app
from moemerge.collecting.maths import CHUNK
from moemerge.config.coefficients import CoefficientMethod, CoefficientSettings
from moemerge.config.data import DataRecipe, DataSettings
from moemerge.config.evaluation import EvaluationSettings, load_task
from moemerge.config.parameter_values import ROLE_NAMES
from moemerge.config.schema import KeptModels
from moemerge.config.settings import CollectingSettings
from moemerge.config.study import StudyConfig
from moemerge.config.study_load import load_study
from moemerge.config.tuning import TuningSettings
from moemerge.errors import UsageError
from moemerge.evaluation.catalogue import find_task, task_names
from moemerge.evaluation.report import ALPHA
from moemerge.generation.prompts import USUAL
from moemerge.merging.methods._spectra import _RANK_TOLERANCE
from moemerge.merging.methods.regmean import LEAST_PIVOT
from moemerge.merging.tokenizer.write import FORMATS
from moemerge.refitting.experts import SAMPLED
from moemerge.runtime.ranks import MEETING_LIMIT
from moemerge.statistics.file import BLOCK, packed_size
from moemerge.text import rows, templates
from moemerge.text.domains import AUTO_HOLDOUT, AUTO_HOLDOUT_ROWS
from moemerge.verification.code_checks import TIMES_THE_REFERENCE
from moemerge.verification.judgement import Grade
from moemerge.verification.sandbox.process import GIB, Limits

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# Programs that pages also name, with flags of their own.
OTHERS = re.compile(
    r"(torchrun|accelerate|pip|make|python|git|srun|pytest|\.venv/bin/|mkdocs|vllm|#SBATCH|scontrol|ruff|benchmarks/)"
)

# Pages that speak of flags of scripts outside of the package.
SCRIPTS = {"reliability", "benchmarks"}


def words_of(page: str) -> str:
    """A page on one line."""
    folder = ROOT if page == "README" else ROOT / "docs"
    return " ".join((folder / f"{page}.md").read_text(encoding="utf-8").split())


# --- verbs and flags ------------------------------------------------------------------------------


def flags_of(group: Any, *path: str) -> dict[tuple[str, ...], set[str]]:
    """The flags of every verb, by its words."""
    found: dict[tuple[str, ...], set[str]] = {}
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
def test_commands_and_flags_of_a_page_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S)
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    lines = [line for block in blocks for line in block.splitlines()] + spans
    if page.stem in SCRIPTS:
        lines = [line for line in lines if line.startswith("moemerge ")]
    added = re.findall(r"^# src/moemerge/cli/(\w+)\.py", text, re.M)
    wrong = []
    for line in lines:
        if any(line.startswith(f"moemerge {verb} ") for verb in added):
            continue  # a verb that the page itself adds
        ours = line.split("-m moemerge ")[-1] if "-m moemerge " in line else line
        if ours is line and OTHERS.search(line):
            continue
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", ours.partition(" #")[0]))
        verb = verb_of(ours)
        allowed = KNOWN if verb is None else FLAGS[verb] | COMMON
        wrong += [f"{flag} in {line!r}" for flag in named - allowed]
    assert wrong == []


def test_every_verb_takes_a_plugin() -> None:
    assert "`--plugin`, which every verb takes" in words_of("methods")
    assert [verb for verb, flags in FLAGS.items() if "--plugin" not in flags] == []


# What several processes may do together; tests of ranks do it.
SHARED = {"calibrate", "refit", "diagnose", "stats", "merge", "tune"}


@pytest.mark.parametrize("path", [path for path in FLAGS if path[0] not in SHARED], ids=" ".join)
def test_other_verbs_refuse_several_processes(
    path: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    command: Any = GROUP
    for word in path:
        command = command.commands[word]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="runs in one process, and torchrun started 2"):
        command.callback()


def test_json_is_a_switch_where_a_command_only_looks() -> None:
    line = words_of("architecture").partition("`--json` is a switch where")[2].partition(" * ")[0]
    only_looks, works = (re.findall(r"`(\w+)`", part) for part in line.split("takes a FILE"))
    assert only_looks
    assert works
    for names, switch in ((only_looks, True), (works, False)):
        for path in (path for path in FLAGS if path[0] in names):
            command: Any = GROUP
            for word in path:
                command = command.commands[word]
            (flag,) = [p for p in command.params if "--json" in p.opts]
            assert flag.is_flag is switch, path


def verb_of(line: str) -> tuple[str, ...] | None:
    """The verb that a command or an inline phrase begins with, if any."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        words = line.split()
    words = words[1:] if words[:1] == ["moemerge"] else words
    found = [path for path in FLAGS if tuple(words[: len(path)]) == path]
    return found[0] if found else None


# --- defaults -------------------------------------------------------------------------------------


def default(settings: type[BaseModel], name: str) -> Any:
    return settings.model_fields[name].default


def parameters() -> dict[str, Any]:
    """Defaults of all methods and wrappers: `regmean.factor`."""
    entries = [(row["method"], row) for row in list_methods()]
    entries += [(row["wrapper"], row) for row in list_wrappers()]
    return {
        f"{name}.{one['name']}": one.get("default")
        for name, row in entries
        for one in [*row.get("per_model", []), *row["options"]]
    }


def short(number: float) -> str:
    """1e-5, and not 1e-05."""
    return f"{number:.0e}".replace("e-0", "e-")


def sentences() -> list[tuple[str, str]]:
    """Phrases of pages, with the defaults that are in force."""
    tune, asked, p = TuningSettings.model_fields, EvaluationSettings.model_fields, parameters()
    adam = default(CoefficientSettings, "steps")
    return [
        (
            "evaluate",
            f"{asked['samples'].default} samples a problem at temperature "
            f"{asked['temperature'].default} are the default",
        ),
        ("tune", f"{tune['epochs'].default:g} epochs, {tune['batch'].default} rows a step"),
        ("tune", f"rises over {tune['warmup'].default:.0%} of".replace("%", " %")),
        ("tune", f"gradients bounded at {tune['clip'].default:g}"),
        ("tune", f"(`--aux-loss {tune['aux_loss'].default:g}`)"),
        ("data", f"`--ngram` words in a row ({default(DataSettings, 'ngram')})"),
        ("methods", f"`factor` ({p['regmean.factor']})"),
        ("methods", f"`min_tokens` ({p['regmean.min_tokens']})"),
        ("methods", f"`floor` ({short(p['fisher.floor'])})"),
        ("methods", f"learning rate {short(p['wudi.lr'])}"),
        ("methods", f"{p['wudi.steps']} steps"),
        ("methods", f"for `time` ({p['wudi.time']:g})"),
        ("methods", f"the `keep` ({p['wudi.keep']}) leading directions"),
        ("methods", f"{p['cat.directions']} and {p['cat.penalty']} were chosen here"),
        ("methods", f"`omega` {p['aim.omega']} is the authors'"),
        ("methods", f"from 0.2 to 0.6; {p['consensus_ta.threshold']} is the middle. With two"),
        (
            "methods",
            f"from 0.2 to 0.6; {default(KeptModels, 'threshold')} is the middle. Calibration",
        ),
        ("methods", f"the `rank` ({default(KeptModels, 'rank')}) leading singular directions"),
        ("coefficients", f"`steps` {adam}"),
        ("coefficients", f"`lr` {short(default(CoefficientSettings, 'lr'))}"),
        ("coefficients", f"`specific` ({default(CoefficientSettings, 'specific'):g})"),
        ("coefficients", f"counts `own` ({default(CoefficientSettings, 'own'):g})"),
        ("coefficients", f"model `other` ({default(CoefficientSettings, 'other'):g})"),
        ("coefficients", f"`temperature` is {default(CoefficientSettings, 'temperature')}"),
        ("coefficients", f"from {default(CoefficientSettings, 'start')}, kept within 0 and 1"),
        ("data", f"({Limits().cpu_seconds:g} s, or four times what the row's own"),
        ("data", f"memory ({Limits().memory // GIB} GiB)"),
        (
            "reliability",
            f"used whole {rows.MOST_BYTES >> 20} MiB; of a larger file, 64 MiB at a time are held",
        ),
        ("statistics", f"in float32 over {CHUNK} tokens"),
        ("statistics", f"({BLOCK} rows each)"),
        ("methods", f"Directions below {short(_RANK_TOLERANCE)} of the strongest"),
        ("methods", f"the least of {short(LEAST_PIVOT)}, "),
        ("evaluate", f"Below {ALPHA} a difference is called significant"),
        ("README", f"Where there are {AUTO_HOLDOUT_ROWS} rows or more, a tenth is held out"),
        ("calibration", f"A tenth of the rows of a domain with {AUTO_HOLDOUT_ROWS} or more"),
        (
            "reliability",
            f"{templates.MOST_SECONDS:g} seconds and give "
            f"{templates.MOST_CHARACTERS >> 20} million characters",
        ),
        ("reliability", f"a row may have {rows.MOST_ROW_BYTES >> 20} MiB"),
        ("reliability", f"may hold {rows.MOST_TIMES} times its size"),
    ]


@pytest.mark.parametrize(("page", "phrase"), sentences())
def test_defaults_are_those_that_pages_state(page: str, phrase: str) -> None:
    assert phrase in words_of(page)


def test_words_for_numbers_are_right() -> None:
    assert TIMES_THE_REFERENCE == 4
    assert f"(Mixtral 8×7B) take {4 * packed_size(14336) / 1e9:.1f} GB each" in words_of(
        "statistics"
    )
    assert AUTO_HOLDOUT == 0.1
    assert MEETING_LIMIT.total_seconds() == 5 * 60
    assert "by themselves after five minutes" in words_of("ranks")
    assert SAMPLED == 8
    assert "chosen on eight of them" in words_of("refit")


def test_a_tuning_by_default_is_the_pages() -> None:
    settings = TuningSettings().resolved()  # type: ignore[call-arg]  # all have defaults
    assert (settings.learning_rate, settings.schedule, settings.weight_decay) == (2e-5, "linear", 0)
    assert "2e-5 that rises over 3 % of the steps and falls linearly, no weight decay" in words_of(
        "tune"
    )


# --- lists ----------------------------------------------------------------------------------------


def test_every_room_is_in_the_table() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("| room | what it does |")[2].partition("\n\n")[0]
    named = {
        w for line in table.splitlines()[2:] for w in re.findall(r"`(\w+)`", line.split(" | ")[0])
    }
    source = ROOT / "src" / "moemerge"
    rooms = {p.name for p in source.iterdir() if (p / "__init__.py").is_file()}
    modules = {p.stem for p in source.glob("*.py") if not p.stem.startswith("__")}
    assert named == rooms | modules


def test_every_method_is_measured_or_said_not_to_be() -> None:
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    ours = {row["method"] for row in list_methods()} | {row["wrapper"] for row in list_wrappers()}
    ours |= set(get_args(CoefficientMethod))
    missing = {name for name in ours if f"`{name}`" not in page}
    assert missing == set()


def test_every_role_of_a_filter_and_chat_template_is_named() -> None:
    page = words_of("config")
    roles = page.partition("or `role:` followed by ")[2].partition(". ")[0]
    assert tuple(re.findall(r"`(\w+)`", roles)) == ROLE_NAMES
    templates = page.partition("| `chat_template` | ")[2].partition(" |")[0]
    assert set(re.findall(r"`(\w+)`", templates)) == {"auto", *FORMATS}


def test_every_key_of_a_study_is_explained() -> None:
    table = set(
        re.findall(
            r"`(\w+)`",
            " ".join(
                line.split("|")[1]
                for line in (ROOT / "docs" / "study.md").read_text(encoding="utf-8").splitlines()
                if line.startswith("| `")
            ),
        )
    )
    assert table == set(StudyConfig.model_fields) | {"extends"}


def test_kinds_of_statistics_judgements_and_columns_are_named() -> None:
    kinds = CollectingSettings.model_fields["kind"].annotation.__args__  # type: ignore[union-attr]
    assert f"--kind {'|'.join(kinds)}" in words_of("statistics")
    page = words_of("data")
    listed = page.partition("Every judgement is one of ")[2].partition(";")[0]
    assert sorted(re.split(", | and ", listed)) == sorted(grade.value for grade in Grade)
    columns = page.partition("A prompt is looked for in the columns ")[2].partition(". Other")[0]
    prompt, answer = (re.findall(r"`(\w+)`", part) for part in columns.split("; the expected"))
    assert prompt == [*USUAL["prompt"], "input", "messages"]
    assert answer == list(USUAL["answer"])


def test_keys_of_a_recipe_are_flags() -> None:
    keys = {f"--{name.replace('_', '-')}" for name in DataRecipe.model_fields} - {"--file"}
    assert keys <= FLAGS["data",]


def test_tasks_are_as_the_table_says() -> None:
    rows = re.findall(r"^\| `([\w+]+)` \| (\d+) \|", (ROOT / "docs/evaluate.md").read_text(), re.M)
    assert {name for name, _ in rows} == set(task_names())
    for name, problems in rows:
        task = find_task(name).settings
        assert (task.problems, task.needs_chat_template) == (int(problems), True)


def test_the_study_and_the_task_of_the_pages_are_read(tmp_path: Path) -> None:
    for page, key, read in (("study", "title:", load_study), ("evaluate", "verify:", load_task)):
        text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
        (block,) = [b for b in re.findall(r"^```yaml\n(.*?)^```", text, re.M | re.S) if key in b]
        path = tmp_path / f"{page}.yml"
        path.write_text(block, encoding="utf-8")
        (tmp_path / "mine.jsonl").touch()
        read(path)
