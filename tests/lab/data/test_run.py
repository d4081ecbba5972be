"""Calibration text from end to end, with the bundled specialists."""

import gzip
import json
import random
import shutil
from collections import Counter

import pytest

import zoo
from evidence.scoring import accuracy
from moemerge.config.faults import parse_settings
from moemerge.config.text_settings import DataSettings
from moemerge.errors import CheckpointError, DataError, UsageError
from moemerge.lab.data.job import DataRequest
from moemerge.lab.data.run import run_data
from moemerge.lab.testbed import bundled_set
from moemerge.lab.testbed.tasks import problems
from moemerge.runtime.progress import Silent
from moemerge.text.rows import read_rows, row_fields
from processes import python


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model without a chat template, whose rows are plain text."""
    out = tmp_path_factory.mktemp("models") / "math"
    ignored = shutil.ignore_patterns("chat_template.jinja")
    return shutil.copytree(bundled_set().models["math"], out, ignore=ignored)


@pytest.fixture(scope="module")
def asked():
    return problems("math", split="test", count=60, seed=11)


@pytest.fixture
def prompts(asked, tmp_path):
    rows = [{"question": p.prompt, "answer": p.answer, "kind": p.kind} for p in asked]
    return zoo.write_rows(tmp_path / "prompts.jsonl", rows)


COMMON = {"max_new_tokens": 24, "device": "cpu"}


def request(model, out, *, prompts=(), text=(), overwrite=False, **values):
    return DataRequest(
        model=model,
        out=out,
        settings=parse_settings(DataSettings, COMMON | values, "settings"),
        prompts=prompts,
        text=text,
        overwrite=overwrite,
    )


def make(model, out, **values):
    return run_data(request(model, out, **values), Silent())


def rows_of(path):
    return [dict(row_fields(row)) for row in read_rows([path])]


def test_right_answers_are_those_that_the_testbed_finds_right(folder, asked, prompts, tmp_path):
    out, all_of_them = tmp_path / "out.jsonl", tmp_path / "all.jsonl"
    report = make(folder, out, prompts=[prompts], verify="exact", completions=all_of_them)
    right = accuracy(folder, asked, device="cpu")
    assert 0 < sum(right) < len(asked)
    expected = [
        {"text": f"{p.prompt}{p.answer}<eos>"} for p, ok in zip(asked, right, strict=True) if ok
    ]
    assert rows_of(out) == expected
    assert report.kept == report.answers.right == sum(right)
    assert report.answers.asked == report.prompts == report.read == len(asked)
    assert [row["grade"] == "right" for row in rows_of(all_of_them)] == right
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_all_answers_prompts_and_references(folder, asked, prompts, tmp_path):
    for keep, count in (("all", 60), ("prompt", 60), ("reference", 60)):
        out = tmp_path / f"{keep}.jsonl.gz"
        report = make(folder, out, prompts=[prompts], keep=keep)
        assert report.kept == len(rows_of(out)) == count
        assert report.answers.asked == (count if keep == "all" else 0)  # else no model is run
        assert gzip.decompress(out.read_bytes())
    assert rows_of(tmp_path / "prompt.jsonl.gz")[0] == {"text": asked[0].prompt}
    assert rows_of(tmp_path / "reference.jsonl.gz")[0] == {
        "prompt": asked[0].prompt,
        "response": asked[0].answer,
    }


def test_a_right_answer_that_was_cut_is_no_right_one(folder, asked, tmp_path):
    out, shown = tmp_path / "o.jsonl", tmp_path / "all.jsonl"
    # A token is a character here: an answer of so many has no room for its end.
    length, _ = Counter(len(p.answer) for p in asked).most_common(1)[0]
    rows = [{"question": p.prompt, "answer": p.answer} for p in asked if len(p.answer) == length]
    prompts = zoo.write_rows(tmp_path / "p.jsonl", rows)
    values = {"prompts": [prompts], "verify": "exact", "max_new_tokens": length}
    with pytest.raises(DataError, match=r"nothing to keep: of \d+ answers"):
        make(folder, out, **values)
    assert (tmp_path / ".o.jsonl.completions").exists()
    assert (tmp_path / ".o.jsonl.judgements").exists()
    make(folder, out, keep="all", completions=shown, **values)
    right = [row for row in rows_of(shown) if row["grade"] == "right"]
    assert {row["finish"] for row in right} == {"length"}
    # Kept without an end token: the model had not ended.
    assert {r["prompt"] + r["response"] for r in right} <= {row["text"] for row in rows_of(out)}


def test_with_a_chat_template_rows_are_conversations(prompts, tmp_path):
    model = bundled_set().models["math"]
    for system, keys in (("", {"prompt", "response"}), ("be brief", {"messages"})):
        out = tmp_path / f"{len(keys)}.jsonl"
        values = {"keep": "all", "limit": 2, "system": system}
        make(model, out, prompts=[prompts], **values)
        assert [set(row) for row in rows_of(out)] == [keys, keys]
    turns = rows_of(out)[0]["messages"]
    assert [turn["role"] for turn in turns] == ["system", "user", "assistant"]


def test_programs_are_judged_in_the_sandbox(folder, tmp_path):
    path = zoo.write_rows(tmp_path / "p.jsonl", [{"prompt": "1+1=", "tests": "assert f() == 1"}])
    values = {"keep": "all", "verify": "code", "allow_code": True}
    report = run_data(request(folder, tmp_path / "o.jsonl", prompts=[path], **values), zoo.Notes())
    assert sum(report.answers.grades.values()) == 1


def test_a_server_needs_the_models_tokenizer(prompts, tmp_path):
    values = {"keep": "all", "engine": "server", "url": ["http://127.0.0.1:9/v1"]}
    with pytest.raises(CheckpointError, match="gone"):
        make(tmp_path / "gone", tmp_path / "o.jsonl", prompts=[prompts], **values)


def test_plain_text_is_drawn_once_and_by_the_seed(folder, tmp_path):
    text = zoo.write_rows(tmp_path / "c4.jsonl", ({"text": f"row {n % 30}"} for n in range(40)))
    drawn = []
    for seed in (0, 0, 1):
        out = tmp_path / f"out{len(drawn)}.jsonl"
        report = make(folder, out, text=[text], limit=12, seed=seed)
        assert (report.read, report.repeated, report.kept) == (40, 10, 12)
        drawn.append(out.read_bytes())
    assert drawn[0] == drawn[1] != drawn[2]


def test_benchmarks_repetitions_and_shares(folder, asked, prompts, tmp_path):
    held = [p.prompt for p in asked[:5]]
    benchmark = zoo.write_rows(tmp_path / "bench.jsonl", ({"question": text} for text in held))
    twice = tmp_path / "twice.jsonl"
    twice.write_bytes(prompts.read_bytes())
    out = tmp_path / "out.jsonl"
    values = {"keep": "prompt", "against": [str(benchmark)], "limit": 12, "balance": "kind"}
    report = make(folder, out, prompts=[prompts, twice], **values)
    assert (report.read, report.repeated) == (120, 60)
    assert report.contaminated == {str(benchmark): 5}
    assert set(report.kept_by_group.values()) == {12 // len({p.kind for p in asked})}
    assert not {row["text"] for row in rows_of(out)} & set(held)


def test_several_samples_are_kept_once_each(folder, prompts, tmp_path):
    values = {"samples": 3, "temperature": 1.0, "verify": "exact", "limit": 20}
    out, one = tmp_path / "out.jsonl", tmp_path / "one.jsonl"
    report = make(folder, out, prompts=[prompts], keep="all", **values)
    assert report.answers.asked == 60
    kept = [row["text"] for row in rows_of(out)]
    assert len(kept) == len(set(kept)) > 20
    make(folder, one, prompts=[prompts], keep="all", per_prompt=1, **values)
    assert len(rows_of(one)) == 20


@pytest.mark.parametrize(
    ("values", "sources", "message"),
    [
        ({}, "prompts", "no check is given"),
        ({"keep": "prompt", "verify": "math"}, "prompts", "no answers to judge"),
        ({"keep": "all"}, "both", "one of them"),
        ({"keep": "all"}, "none", "one of them"),
        ({"verify": "maths"}, "prompts", "did you mean 'math'"),
        ({"verify": "code"}, "prompts", "allow_code=True"),
    ],
)
def test_requests_that_make_no_sense_are_refused_at_once(
    folder, prompts, tmp_path, values, sources, message
):
    given = {
        "prompts": [prompts] if sources in ("prompts", "both") else (),
        "text": [prompts] if sources == "both" else (),
    }
    with pytest.raises(UsageError, match=message):
        make(folder, tmp_path / "out.jsonl", **given, **values)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prompts.jsonl"]


def test_outputs_that_exist_or_are_of_another_kind_are_refused(folder, prompts, tmp_path):
    with pytest.raises(CheckpointError, match="is also an input"):
        make(folder, prompts, prompts=[prompts], keep="prompt")
    nowhere = tmp_path / "nowhere" / "c.jsonl"
    with pytest.raises(CheckpointError, match="there is no folder"):
        make(folder, tmp_path / "o.jsonl", prompts=[prompts], keep="all", completions=nowhere)
    with pytest.raises(UsageError, match="unknown kind"):
        make(folder, tmp_path / "out.csv", prompts=[prompts], keep="all")


def test_rows_that_cannot_be_judged_are_refused_before_the_model_is_asked(folder, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "1+1=", "answer": "2"}\n{"question": "1+2="}\n')
    with pytest.raises(DataError, match="row 2: 'answer' is NoneType"):
        make(folder, tmp_path / "o.jsonl", prompts=[path], verify="math")


def test_no_right_answer_is_an_error_and_the_answers_wait(folder, tmp_path):
    path, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    path.write_text('{"question": "1+1=", "answer": "never"}\n')
    with pytest.raises(DataError, match="nothing to keep: of 1 answer "):
        make(folder, out, prompts=[path], verify="exact")
    assert not out.exists()
    report = make(folder, out, prompts=[path], keep="all")
    assert report.reused == 1


def test_an_unfinished_run_of_other_settings_is_not_mixed_in(folder, tmp_path):
    path, out = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    path.write_text('{"question": "1+1=", "answer": "never"}\n')
    with pytest.raises(DataError, match="nothing to keep"):
        make(folder, out, prompts=[path], verify="exact")
    with pytest.raises(DataError, match=r"temperature was 0.0, is 0.5"):
        make(folder, out, prompts=[path], keep="all", temperature=0.5)
    make(folder, out, prompts=[path], keep="all", temperature=0.5, overwrite=True)
    assert out.exists()


# In a process of its own, whose threads have not begun: a fork of the tests' process, which has
# many, may wait for ever for a lock that one of them held.
KILLED = """
import json, os, signal, sys, time
from pathlib import Path
from moemerge.config.faults import parse_settings
from moemerge.lab.data.job import DataRequest
from moemerge.lab.data.run import run_data
from moemerge.config.text_settings import DataSettings
from moemerge.runtime.progress import Silent

class Loud(Silent):
    def __init__(self, pipe):
        self.pipe = pipe

    def advance(self, amount):
        os.write(self.pipe, b".")

def until_killed(request, steps, seconds):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        run_data(request, Loud(writing))
        os._exit(0)
    os.close(writing)
    for _ in range(steps):
        assert os.read(reading, 1), "ended before it was killed"
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reading)
    assert not request.out.exists()

model, out, prompts, values, kills = json.loads(sys.argv[1])
settings = parse_settings(DataSettings, values, "settings")
request = DataRequest(model=Path(model), out=Path(out), settings=settings, prompts=[Path(prompts)])
for steps, seconds in kills:
    until_killed(request, steps, seconds)
"""


def test_a_run_that_is_killed_again_and_again_ends_with_the_same_rows(folder, prompts, tmp_path):
    values = {
        "samples": 2, "temperature": 0.8, "verify": "exact", "batch_size": 8, "keep": "all",
    }  # fmt: skip
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    make(folder, whole, prompts=[prompts], **values)
    asked = request(folder, out, prompts=[prompts], **values)
    rng = random.Random(0)
    kills = [(rng.randrange(1, 12), rng.random() * 0.02) for _ in range(5)]
    words = json.dumps([str(folder), str(out), str(prompts), COMMON | values, kills])
    python(KILLED, words, timeout=200).check_returncode()
    report = run_data(asked, Silent())
    assert 10 <= report.reused < 120
    assert out.read_bytes() == whole.read_bytes()
