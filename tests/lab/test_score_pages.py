"""The page of an evaluation and the entries of model cards."""

import os
import shutil

import numpy as np
import pytest

import zoo
from lab.evaluation_cases import run, write_task
from moemerge.errors import DataError, UsageError
from moemerge.lab.pages import render_scores
from moemerge.lab.score_pages import model_index, with_index
from moemerge.lab.scores import EvaluationReport, TaskScores, compare_models
from report.scores_sample import HOSTILE, sample_page


@pytest.fixture(scope="module")
def report():
    scores = np.array([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]])
    task = TaskScores(
        "gsm8k", "GSM8K", "math", ("1", "2", "3"), scores, single=True,
        source="openai/gsm8k:main/test*",
    )  # fmt: skip
    rows = compare_models([task], ["a", 'b"'], draws=100, seed=0)
    return EvaluationReport("correct", {}, {"a": "out/a", 'b"': "b"}, (task,), rows)


def test_nothing_of_a_text_is_markup():
    page = render_scores(sample_page())
    assert HOSTILE not in page
    assert "<script>alert" not in page
    assert page.count("</script>") == 3


def test_the_hub_reads_the_entries(report):
    from huggingface_hub import ModelCard

    card = with_index("# Mine\n\nWords.\n", model_index(report, 'b"'))
    result = ModelCard(card).data.eval_results[0]
    assert (result.dataset_type, result.dataset_name) == ("openai/gsm8k", "GSM8K")
    assert result.metric_value == 100.0
    assert ModelCard(card).data.model_name == 'b"'
    assert "protocol correct, standard error 0.00" in result.metric_name


def test_a_card_keeps_all_but_its_old_scores(report):
    old = "model-index:\n- name: old\n  results:\n  - x: 1\n"
    card = f"---\nlicense: mit\n{old}tags:\n- merge\n---\n# T\n"
    new = with_index(card, model_index(report, "a"))
    assert new.startswith("---\nlicense: mit\ntags:\n- merge\nmodel-index:\n")
    assert new.endswith("---\n# T\n")
    assert "old" not in new
    assert with_index(new, model_index(report, "a")) == new


def test_page_and_card_are_written(specialists, sums, tmp_path):
    model, page = tmp_path / "mine", tmp_path / "scores.html"
    shutil.copytree(specialists["math"], model)
    task = write_task(tmp_path, sums)
    run([model, specialists["chat"]], [task], tmp_path / "out", report=page)
    assert "<h1>mine is better than chat, by" in page.read_text()
    run([model], [task], tmp_path / "out", card=True)
    assert "model-index:" in (model / "README.md").read_text()
    with pytest.raises(DataError, match="no card can be written"):
        run([], [task], tmp_path / "out", card=True, rescore=True)
    with pytest.raises(UsageError, match="there is no folder"):
        run([model], [task], tmp_path / "out", report=tmp_path / "no" / "page.html")
    with pytest.raises(DataError, match="its card cannot be written"):
        run(["org/name"], [task], tmp_path / "out", card=True)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "latin-1"])
def test_a_readme_that_is_no_text_file_is_refused_first(specialists, tmp_path, kind):
    model, elsewhere = tmp_path / "mine", tmp_path / "elsewhere.md"
    shutil.copytree(specialists["math"], model)
    readme = model / "README.md"
    readme.unlink(missing_ok=True)
    elsewhere.write_text("private")
    make = {
        "link": lambda: readme.symlink_to(elsewhere),
        "folder": readme.mkdir,
        "pipe": lambda: os.mkfifo(readme),
        "latin-1": lambda: readme.write_bytes(b"caf\xe9"),
    }
    make[kind]()
    with pytest.raises(DataError, match=r"README\.md cannot be given scores"):
        run([model], ["gsm8k"], tmp_path / "out", card=True, data={"gsm8k": [rows(tmp_path)]})
    assert elsewhere.read_text() == "private"


def rows(folder):
    return zoo.write_rows(folder / "rows.jsonl", [{"question": "1+1", "answer": "2"}])
