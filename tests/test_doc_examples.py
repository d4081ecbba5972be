"""Commands and programs of README, docs and examples, run as they stand on tiny models."""

import importlib.util
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import quantised_zoo as qz
import zoo
from moemerge.cli.app import app
from repairs.calibration.cases import write_text

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.yml"))

_BLOCK = re.compile(r"^```(sh|yaml|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# (\S+\.(?:yml|py))$")  # a block's first line that names a file
# Verbs that write a folder: which of their words is OUT.
WRITES = {
    "merge": 2,
    "run": 2,
    "calibrate": 2,
    "refit": 2,
    "distill": 2,
    "prune": 2,
    "compose": 2,
    "swap-routers": 4,
    "extract": 3,
    "extract-lora": 3,
    "convert": 2,
    "tune": 2,
}
_WRITTEN = re.compile(
    r"moemerge\.(?:merge|calibrate|refit|run|tune)\(\s*\"[^\"]+\",\s*\"([^\"]+)\""
)
# Verbs that train, download or take minutes; they have tests of their own.
# A random model's answers are never right, so `data` would keep none.
SLOW = {"demo", "data", "distill", "evaluate", "study"}


@pytest.fixture(scope="module")
def models(zoo_folder, tmp_path_factory):
    """The models that the documents speak of, under the names they have there."""
    folder = tmp_path_factory.mktemp("models")
    built = zoo_folder("olmoe", num_hidden_layers=4)  # some examples ask for `--layers last:4`
    base = Path(shutil.copytree(built, folder / "base"))
    zoo.tiny_tokenizer(base, chat_template=True)
    tuned = {
        name: zoo.perturb(base, folder / name, seed) for seed, name in enumerate(["math", "code"])
    }
    fp8 = {
        f"org/{path.name}-FP8": qz.convert(
            path, folder / f"{path.name}-FP8", qz.fp8_config(8, 8), qz.block_fp8(8, 8)
        )
        for path in (base, tuned["math"])
    }
    dense = {
        name: zoo.tiny_tokenizer(zoo.dense_llama(folder / name, seed=seed))
        for seed, name in enumerate(["llama", "llama-math", "llama-code"])
    }
    return {
        **fp8,
        **dense,
        "allenai/OLMoE-1B-7B-0125": base,
        "Qwen/Qwen3-30B-A3B": base,
        "base": base,
        "org/base": base,
        **tuned,
        **{f"org/{name}": path for name, path in tuned.items()},
    }


@pytest.fixture
def scratch(models, tmp_path, monkeypatch):
    """A folder to stand in, with those models and text of each domain."""
    for name, path in models.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(path)
    for seed, name in enumerate(["math", "math-test", "code", "code-test", "general", "unseen"]):
        write_text(tmp_path / f"{name}.jsonl", seed=seed, rows=12)
    shutil.copytree(models["math"], tmp_path / "merged")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_methods", None)  # the plugin of a page is not loaded elsewhere


def commands(block, *, slow=False):
    """The moemerge commands of a shell block; comments and other programs are left out."""
    joined = block.replace("\\\n", " ")
    lines = [shlex.split(line, comments=True) for line in joined.splitlines()]
    lines = [words[: words.index(">")] if ">" in words else words for words in lines]
    every = [words[1:] for words in lines if words[:1] == ["moemerge"]]
    return [words for words in every if slow or words[0] not in SLOW]


def remove(out):
    """A page may write the same folder twice, by a command and from Python, say."""
    folder = Path(out)
    if folder.is_symlink():
        folder.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def run(words):
    if words[0] in WRITES:
        remove(words[WRITES[words[0]]].rstrip("/"))
    if "--verify" in words:  # checks a folder that moemerge has written
        remove(words[1].rstrip("/"))
        run(["swap-routers", "base", "--from", "math", words[1]])
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"moemerge {shlex.join(words)}\n{result.output}"


def verbs(group=None, *path):
    """Every command of the command line with its name."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        if hasattr(command, "commands"):
            yield from verbs(command, *path, name)
        else:
            yield " ".join([*path, name]), command


VERBS = dict(verbs())


@pytest.mark.parametrize("verb", VERBS)
def test_examples_of_help_run(verb, scratch, models):
    text = VERBS[verb].epilog
    assert all(len(line) <= 80 for line in text.splitlines()), "cannot be copied from a terminal"
    examples = [words for words in commands(text, slow=True) if shlex.join(words).startswith(verb)]
    assert len(examples) >= 2
    for name, source in {"A": "math", "B": "code", "model": "math"}.items():
        (scratch / name).symlink_to(models[source])
    shutil.copytree(models["math"], scratch / "calibrated")
    (scratch / "my_methods.py").touch()
    for source, copy in {"math": "a", "code": "b"}.items():
        shutil.copy(f"{source}.jsonl", f"{copy}.jsonl")
    for name in ("ties", "wudi"):
        config = (scratch / "examples" / f"{name}.yml").read_text(encoding="utf-8")
        block = "calibration: {data: {math: math.jsonl, code: code.jsonl}}\n"
        (scratch / f"{name}.yml").write_text(config.replace("steps: 300", "steps: 3") + block)
    if verb == "compose":
        page = (ROOT / "docs" / "compose.md").read_text(encoding="utf-8")
        (scratch / "moe.yml").write_text(_BLOCK.findall(page)[0][1])
    if verb == "extract":
        models_of = "models: [{model: math, name: math}, {model: code, name: code}]"
        text = f"merge_method: emr\nbase_model: base\n{models_of}\ntasks: {{keep: emr}}\n"
        (scratch / "shared.yml").write_text(text)
        run(["merge", "shared.yml", "shared"])
    for words in examples:
        words = [word if torch.cuda.is_available() or word != "cuda" else "cpu" for word in words]
        if words[0] in SLOW:  # its flags exist
            own = words[len(verb.split()) :]
            VERBS[verb].make_context(verb, own)
        else:
            run(words)


def runnable(page):
    return any(
        kind == "python" or commands(text) for kind, text in _BLOCK.findall(page.read_text())
    )


@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p)], ids=lambda p: p.name)
def test_blocks_of_a_page_run(page, scratch):
    """In their order, in one folder: later blocks use what earlier ones wrote."""
    for kind, text in _BLOCK.findall(page.read_text(encoding="utf-8")):
        named = _FILE.match(text.partition("\n")[0])
        if named:
            path = scratch / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if kind == "sh":
            for words in commands(text):
                run(words)
        elif kind == "python" and named:  # a module, which commands below may name
            importlib.import_module(path.stem)
        elif kind == "python":
            for out in _WRITTEN.findall(text):
                remove(out)
            exec(
                compile(text, f"{page.name}, a block", "exec", dont_inherit=True),
                {"__name__": "__main__"},
            )


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.name)
def test_examples_run(example, scratch):
    text = example.read_text(encoding="utf-8")
    said = [line.removeprefix("#   ") for line in text.splitlines() if line.startswith("#   ")]
    steps = commands("\n".join(said))
    for words in steps:
        run(words)
    if not any(words[0] in {"merge", "run"} for words in steps):
        run(["run", str(example), "merged/"])
    assert (scratch / "merged" / "config.json").exists()
