"""`moemerge stats`, `data`, `evaluate` and `--sample`: flags, tables, words for what goes wrong."""

import json

import pytest

import zoo
from lab.evaluation_cases import write_task
from moemerge.lab import api as lab_api
from moemerge.lab.testbed import bundled_set
from moemerge.lab.testbed.tasks import problems
from moemerge.statistics import Statistics
from terminal import moemerge

GREEDY = ["--samples", "1", "--temperature", "0", "--device", "cpu", "--draws", "300"]


@pytest.fixture(scope="module")
def models():
    return [str(bundled_set().models[name]) for name in ("math", "chat")]


@pytest.fixture
def task(tmp_path):
    return write_task(tmp_path, problems("math", split="test", count=20, seed=3))


def test_scores_pairs_and_what_is_to_do(models, task, tmp_path):
    out, report = tmp_path / "out", tmp_path / "report.json"
    asked = ["--task", task, "--out", out, *GREEDY]
    result = moemerge("evaluate", *models, *asked, "--json", report)
    assert result.exit_code == 0, result.output
    assert "math: 20 completions to make" in result.output
    assert "at most 480 tokens to generate" in result.output
    assert "chat − math" in result.output
    told = json.loads(report.read_text())
    score = told["results"][0]["scores"]["math"]
    assert f"{100 * score['mean']:.1f} ± {100 * score['error']:.1f}" in result.output
    del told["moemerge"]
    assert told == json.loads((out / "results.json").read_text())["evaluation"]
    again = moemerge("evaluate", "--rescore", *asked)
    assert again.exit_code == 0, again.output
    assert "math − chat" in again.output


def test_draws_are_bounded(models, task, tmp_path):
    asked = ["--out", tmp_path / "out", "--task", task, "--draws", "100000000000"]
    result = moemerge("evaluate", *models, *asked)
    assert result.exit_code == 2
    assert "--draws" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--task", "gsm8"], 2, "unknown task 'gsm8', did you mean 'gsm8k'?"),
        ([], 2, "no task is given"),
        (["--task", "gsm8k", "--data", "gsm8k=nowhere.jsonl"], 3, "no such file nowhere.jsonl"),
        (["--task", "TASK", "--protocol", "papers"], 2, "--protocol"),
        (["--task", "TASK", "--engine", "server", "--url", "http://x/v1"], 2, "a server runs one"),
        (["--task", "TASK", "--rescore"], 3, "20 answers to sums missing in"),
    ],
)
def test_what_is_wrong_is_told_and_nothing_is_left(models, task, tmp_path, words, code, message):
    before = sorted(path.name for path in tmp_path.iterdir())
    words = [task if word == "TASK" else word for word in words]
    result = moemerge("evaluate", *models, "--out", tmp_path / "out", *words, *GREEDY)
    assert result.exit_code == code, result.output
    assert message in " ".join(result.output.split())
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.fixture(scope="module")
def model():
    return str(bundled_set().models["math"])


@pytest.fixture
def prompts(tmp_path):
    asked = problems("math", split="test", count=20, seed=3)
    rows = [{"q": p.prompt, "final": p.answer} for p in asked]
    return zoo.write_rows(tmp_path / "prompts.jsonl", rows)


def test_answers_are_kept_and_told_of(model, prompts, tmp_path):
    out, report = tmp_path / "out.jsonl", tmp_path / "report.json"
    result = moemerge(
        "data", model, out, "--prompts", prompts, "--map", "prompt=q,answer=final", "--verify",
        "exact", "--max-new-tokens", "24", "--device", "cpu", "--json", report,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    told = json.loads(report.read_text())
    assert told["kept"] == len(out.read_text().splitlines()) > 0
    assert f"kept     {told['kept']} rows" in result.output
    assert "20 asked for, 20 ended" in result.output
    assert f"{told['answers']['grades']['right']} right" in result.output


def test_each_model_completes_each_prompt(tmp_path):
    model, config, out = bundled_set().models["math"], tmp_path / "c.yml", tmp_path / "out"
    config.write_text(f"merge_method: passthrough\nmodels: [{{model: {model}, name: math}}]\n")
    done = moemerge("merge", config, out, "--sample", "2 + 2 =", "--sample", "hello")
    lines = [line.split(" -> ") for line in done.stdout.splitlines() if " -> " in line]
    prompts = ["'2 + 2 ='", "'hello'"]
    assert [line[0] for line in lines] == [f"{m}: {p}" for m in ("OUT", "math") for p in prompts]
    answers = [line[1] for line in lines]
    assert answers[:2] == answers[2:]  # the same model twice
    assert len(answers[0]) > 2
    done = moemerge("merge", config, out, "-v", "--overwrite")
    built_in = [line for line in done.stdout.splitlines() if " -> " in line]
    assert [line.split(": ")[0] for line in built_in] == ["OUT", "OUT", "math", "math"]
    done = moemerge("merge", config, tmp_path / "b", "--sample", " ")
    assert done.exit_code == 2
    assert "the prompt is empty" in done.stderr
    assert not (tmp_path / "b").exists()
    for file in out.glob("tokenizer*"):
        file.unlink()
    assert "could not run" in lab_api.sample({"OUT": out}, ["hello"])["OUT"][0]


@pytest.fixture
def case(zoo_folder, tmp_path):
    """A model folder and its text."""
    folder = zoo.perturb(zoo_folder("olmoe"), tmp_path / "model", seed=1)
    zoo.tiny_tokenizer(folder)
    texts = ("one plus two is three", "def sum of list return value", "what is a model")
    return folder, zoo.write_rows(tmp_path / "text.jsonl", ({"text": text} for text in texts))


def test_the_file_and_what_is_told(case, tmp_path):
    folder, text = case
    out, report = tmp_path / "a.stats", tmp_path / "report.json"
    result = moemerge("stats", folder, out, "--data", text, "--device", "cpu", "--json", report)
    assert result.exit_code == 0, result.output
    assert "gram statistics of" in result.stdout
    assert "3 sequences" in result.stdout
    found = json.loads(report.read_text())
    assert found["provenance"]["model"] == str(folder)
    assert found["nbytes"] == out.stat().st_size
    with Statistics.open(out) as written:
        assert written.kind == "gram"
        assert len(written.units) == found["units"]
        assert written.provenance.tokens == found["provenance"]["tokens"]


def test_what_is_not_read_of_the_text_is_told(case, tmp_path):
    folder, text = case
    rows = [{"prompt": "one plus two", "respnse": "three"}, {"prompt": "what is a model"}]
    zoo.write_rows(text, rows)
    flags = ("--data", text, "--device", "cpu", "--max-length", "3")
    result = moemerge("stats", folder, tmp_path / "a.stats", *flags)
    assert "respnse" in result.stderr
    assert "2 of 2 rows longer than `max_length`, 3 tokens" in result.stderr
    quiet = moemerge("stats", folder, tmp_path / "b.stats", *flags, "-q")
    assert (quiet.exit_code, quiet.output) == (0, "")
    assert (tmp_path / "a.stats").read_bytes() == (tmp_path / "b.stats").read_bytes()
