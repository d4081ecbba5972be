"""Perplexity of plain text: against transformers, by documents, and compared in pairs."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

import zoo
from collecting.cases import token_rows
from forward.reference import row_losses
from lab.evaluation_cases import request, run, write_task
from moemerge.errors import DataError, UsageError
from moemerge.forward.losses import DocumentLosses
from moemerge.lab.benchmarks import prepare
from moemerge.lab.score_pages import model_index
from moemerge.lab.testbed import bundled_set
from moemerge.lab.text_losses import compare_losses
from terminal import succeed


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    lines = (bundled_set().models["math"].parent / "data" / "math.jsonl").read_text().splitlines()
    texts = ("{prompt}{response}".format(**json.loads(line)) for line in lines[:24])
    rows = [{"text": text, "page": at // 4} for at, text in enumerate(texts)]
    return zoo.write_rows(tmp_path_factory.mktemp("text") / "math.jsonl", rows)


def test_it_is_the_loss_of_the_models(specialists, text, tmp_path):
    models = [specialists["math"], specialists["chat"]]
    page = tmp_path / "page.html"
    report = run(
        models, ["perplexity"], tmp_path / "out", data={"sums": [text]}, group="page",
        map="text=text", report=page, card=False,
    )  # fmt: skip
    (found,) = report.perplexity
    assert (found.name, found.size) == ("sums", 6)
    for model in models:
        rows = row_losses(model, token_rows(model, text))
        sums = [sum(s for s, _ in rows[at : at + 4]) for at in range(0, 24, 4)]
        tokens = [sum(n for _, n in rows[at : at + 4]) for at in range(0, 24, 4)]
        score = found.scores[model.name]
        assert score.loss == pytest.approx(sum(sums) / sum(tokens), rel=1e-5)
        assert score.perplexity == pytest.approx(math.exp(score.loss))
        errors = [s - score.loss * n for s, n in zip(sums, tokens, strict=True)]
        spread = math.sqrt(6 / 5 * sum(e * e for e in errors)) / sum(tokens)
        assert score.error == pytest.approx(spread, rel=1e-3)
        assert score.interval is not None
        assert score.interval[0] < score.loss < score.interval[1]
    (pair,) = found.pairs
    assert pair.difference == pytest.approx(
        found.scores["chat"].loss - found.scores["math"].loss, rel=1e-9
    )
    assert (pair.lost, pair.won) == (6, 0)
    assert pair.significant
    assert report.headline.startswith("math predicts best: perplexity")
    document = json.loads((tmp_path / "out" / "results.json").read_text())["evaluation"]
    assert document["perplexity"][0]["pairs"][0]["difference"] == pair.difference
    kept = (tmp_path / "out" / "losses" / "sums" / "math.jsonl").read_text().splitlines()
    assert len(kept) == 6
    assert "Perplexity of sums" in page.read_text()
    assert '- type: "perplexity"' in model_index(report, "math")


def test_it_is_shown_next_to_other_tasks(specialists, sums, text, tmp_path):
    task = write_task(tmp_path / "tasks", sums[:3], verify="lab.evaluation_cases:as_the_testbed")
    result = succeed(
        "evaluate", specialists["math"], specialists["code"], "--task", task, "--task",
        "perplexity", "--data", f"plain={text}", "--samples", 1, "--temperature", 0, "--device",
        "cpu", "--out", tmp_path / "out", "--draws", 200,
    )  # fmt: skip
    assert "plain: code" in result.stdout  # a narrow terminal breaks the line after it
    assert "perplexity" in result.stdout


def test_documents_of_many_tokens_are_not_many_observations():
    """Ten copies of each document are as unsure as one, by draws and by the formula."""
    rng = np.random.default_rng(0)
    sums = tuple(rng.normal(20.0, 4.0, 30))
    once = DocumentLosses(sums, (10,) * 30)
    tenfold = DocumentLosses(tuple(10 * s for s in sums), (100,) * 30)
    found = [
        compare_losses("t", {"a": one}, ["a"], 4000, np.random.default_rng(1)).scores["a"]
        for one in (once, tenfold)
    ]
    assert found[0].error == pytest.approx(found[1].error)
    assert found[0].interval == pytest.approx(found[1].interval)
    low, high = found[0].interval or (0.0, 0.0)
    assert high - low == pytest.approx(2 * 1.96 * (found[0].error or 0.0), rel=0.1)


def test_models_with_other_tokens_are_not_compared(specialists, text, tmp_path):
    other = Path(shutil.copytree(specialists["math"], tmp_path / "other"))
    zoo.tiny_tokenizer(other, words=("one", "two"))
    report = run([specialists["math"], other], ["perplexity"], tmp_path / "out",
                 data={"sums": [text]})  # fmt: skip
    assert report.perplexity[0].pairs == ()
    assert any("other has other tokens than math" in notice for notice in report.notices)


def test_what_is_missing_is_an_error(specialists, text, tmp_path):
    model = specialists["math"]
    with pytest.raises(UsageError, match="the task perplexity needs text"):
        prepare(request([model], ["perplexity"], tmp_path / "out"))
    with pytest.raises(UsageError, match="no answers that could be rescored"):
        prepare(
            request([model], ["perplexity"], tmp_path / "out", data={"a": [text]}, rescore=True)
        )
    with pytest.raises(DataError, match="no field 'document'"):
        run([model], ["perplexity"], tmp_path / "out", data={"a": [text]}, group="document")
    with pytest.raises(UsageError, match="none of the tasks"):
        prepare(request([model], [], tmp_path / "out", data={"a": [text]}, lm_eval=["x"]))
