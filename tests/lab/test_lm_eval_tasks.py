"""Tasks of lm-eval with our engine, against lm-eval's own."""

import time

import pytest

pytest.importorskip("lm_eval")

import zoo
from evidence.scoring import accuracy
from lab.evaluation_cases import request, run
from moemerge.errors import DataError, UsageError
from moemerge.lab.benchmarks import prepare
from moemerge.lab.lm_eval_tasks import Bridge, language_model
from moemerge.runtime.progress import Silent

GENERATED = """
task: sums_written
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
generation_kwargs: {max_gen_toks: 24, until: []}
num_fewshot: 0
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOSEN = """
task: sums_chosen
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
target_delimiter: ""
doc_to_choice: ["{{answer}}", "1", "77"]
doc_to_target: 0
num_fewshot: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def task_file(sums, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": p.prompt, "answer": p.answer} for p in sums[:16]]
    data = zoo.write_rows(folder / "data.jsonl", rows)

    def write(name, text):
        path = folder / f"{name}.yaml"
        path.write_text(text.replace("DATA", str(data)))
        return str(path)

    return write


@pytest.fixture(autouse=True)
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_generated_answers_are_scored_and_compared(specialists, sums, task_file, tmp_path):
    models = [specialists["math"], specialists["chat"]]
    report = run(models, [], tmp_path / "out", lm_eval=task_file("written", GENERATED))
    row = report.rows[0]
    assert (row.title, report.tasks[0].metric) == ("sums_written (lm-eval)", "exact_match")
    for place, model in enumerate(models):
        expected = accuracy(model, sums[:16], device="cpu")
        assert report.tasks[0].scores[place].tolist() == expected
    assert row.pairs[0].mcnemar is not None


def test_choices_are_as_likely_as_lm_eval_finds_them(specialists, task_file, tmp_path):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    task = load_yaml(task_file("chosen", CHOSEN))
    job = prepare(request([specialists["math"]], [], tmp_path / "out", lm_eval="x"))
    bridge = Bridge(job, specialists["math"], Silent())
    theirs = HFLM(pretrained=str(specialists["math"]), device="cpu", dtype="float32", batch_size=4)
    found = []
    for model in (language_model(bridge), theirs):
        results = lm_eval.simple_evaluate(
            model,
            tasks=[task],
            task_manager=TaskManager(include_defaults=False),
            bootstrap_iters=0,
        )
        samples = results["samples"]["sums_chosen"]
        found.append([[float(value) for value, _ in s["filtered_resps"]] for s in samples])
    bridge.close()
    for mine, other in zip(*found, strict=True):
        assert mine == pytest.approx(other, abs=1e-3)


def test_what_is_wrong_is_told(specialists, tmp_path, monkeypatch):
    models, out = [specialists["math"]], tmp_path / "out"
    with pytest.raises(DataError, match=r"no such task file nowhere\.yml"):
        run(models, [], out, lm_eval="nowhere.yml")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    gone = tmp_path / "gone.yaml"
    text = GENERATED.replace("json", "org/gone", 1).replace("dataset_kwargs", "metadata")
    gone.write_text(text)
    with pytest.raises(DataError, match=r"gone\.yaml of lm-eval cannot be loaded .*org/gone"):
        run(models, [], out, lm_eval=str(gone))
    assert time.monotonic() - began < 60
    with pytest.raises(UsageError, match="cannot be rescored"):
        run(models, [], out, lm_eval="arc_easy", rescore=True)
