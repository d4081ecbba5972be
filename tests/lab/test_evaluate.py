"""Evaluations from end to end, with the bundled specialists."""

import json
import shutil
from dataclasses import replace

import pytest

import moemerge
from evidence.scoring import accuracy
from lab.evaluation_cases import GREEDY, kept_answers, run, write_task
from moemerge.errors import DataError, ResourceError
from moemerge.lab.engines import TransformersEngine
from moemerge.lab.pages import render_scores
from moemerge.lab.score_pages import page_document
from moemerge.lab.testbed import bundled_set
from moemerge.lab.testbed.tasks import problems
from zoo import Notes


def test_scores_are_those_of_the_testbed_problem_by_problem(specialists, sums, tmp_path):
    task, out = write_task(tmp_path, sums), tmp_path / "out"
    models = [specialists["math"], specialists["chat"]]
    report = run(models, [task], out)
    for place, model in enumerate(models):
        assert report.tasks[0].scores[place].tolist() == accuracy(model, sums, device="cpu")
    assert 0 < report.rows[0].scores["math"].mean < 1
    assert [row["prompt"] for row in kept_answers(out, "sums", "math")] == [p.prompt for p in sums]
    results = json.loads((out / "results.json").read_text())["evaluation"]
    assert results == json.loads(json.dumps(report.to_json()))
    problem = results["tasks"][0]["problems"][0]
    assert problem == {
        "problem": "1", "math": report.tasks[0].scores[0, 0], "chat": report.tasks[0].scores[1, 0],
    }  # fmt: skip


def test_programs_are_scored_as_in_the_testbed(specialists, tmp_path):
    asked = problems("code", split="test", count=16, seed=5)
    task = write_task(tmp_path, asked, verify="lab.evaluation_cases:as_the_testbed")
    models = list(specialists.values())
    report = run(models, [task], tmp_path / "out")
    right = [accuracy(model, asked, device="cpu") for model in models]
    assert report.tasks[0].scores.tolist() == right


def test_nothing_is_asked_twice(specialists, sums, tmp_path, monkeypatch):
    task, out = write_task(tmp_path, sums[:12]), tmp_path / "out"
    asked, whole = [], TransformersEngine.generate

    def counted(self, wanted):
        wanted = list(wanted)
        asked.append(len(wanted))
        return whole(self, wanted)

    monkeypatch.setattr(TransformersEngine, "generate", counted)
    math, chat = (specialists[name] for name in ("math", "chat"))
    moemerge.evaluate([math], task, out=out, limit=4, **GREEDY)
    moemerge.evaluate([math], task, out=out, **GREEDY)  # more problems
    moemerge.evaluate([math], task, out=out, protocol="paper", **GREEDY)
    moemerge.evaluate([chat], task, out=out, **GREEDY)  # another model, alone
    together = moemerge.evaluate([math, chat], task, out=out, **GREEDY)
    assert asked == [4, 8, 12]
    again = moemerge.evaluate([], task, out=out, rescore=True, **GREEDY)
    assert asked == [4, 8, 12]
    both = [{row["problem"]: row for row in r.to_json()["tasks"][0]["problems"]}
            for r in (together, again)]  # fmt: skip
    assert both[0] == both[1]
    assert len(again.rows[0].pairs) == 1
    notes = Notes()
    moemerge.evaluate([math], task, out=out, progress=notes, **GREEDY)
    assert [note for note in notes.said if "exist" in note] == [
        "math: all 12 completions exist already"
    ]


def test_what_could_not_be_made_or_judged_counts_as_wrong_and_is_told(specialists, sums, tmp_path):
    long = replace(sums[0], prompt="1+" * 2000 + "1=")
    task = write_task(tmp_path, [sums[1], long])
    report = run([specialists["math"]], [task], tmp_path / "out")
    assert report.tasks[0].scores[0, 1] == 0
    assert "1 completion could not be made, counted as wrong" in report.notices[0]
    task = write_task(tmp_path, sums[:3], name="riddles", verify="lab.evaluation_cases:cannot_tell")
    report = run([specialists["math"]], [task], tmp_path / "out")
    assert report.tasks[0].scores.tolist() == [[0, 0, 0]]
    assert report.notices == ("math, riddles: 3 answers undecided, counted as wrong",)


def test_answers_are_judged_anew_without_the_models(specialists, sums, tmp_path):
    task, out = write_task(tmp_path, sums), tmp_path / "out"
    models = [specialists["math"], specialists["chat"]]
    first = run(models, [task], out)
    task = write_task(tmp_path, sums, verify="math")  # judges by numbers, not by words
    again = run([], [task], out, rescore=True)
    assert set(again.models) == {"math", "chat"}
    assert again.tasks[0].counts[0].asked == len(sums)
    assert again.rows[0].scores["math"].mean >= first.rows[0].scores["math"].mean
    with pytest.raises(DataError, match="holds no answers with these sampling settings"):
        run([], [task], out, rescore=True, temperature=0.5)
    with pytest.raises(DataError, match="40 answers to sums missing in"):
        run([specialists["code"]], [task], out, rescore=True)


def test_missing_data_and_missing_templates_are_refused(specialists, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"no such file .*nowhere\.jsonl"):
        run([specialists["math"]], ["gsm8k"], out, data={"gsm8k": ["nowhere.jsonl"]})
    rows = [{"question": "1+1=", "answer": "so\n#### 2"}]
    bare = tmp_path / "bare"
    ignored = shutil.ignore_patterns("chat_template.jinja")
    shutil.copytree(specialists["math"], bare, ignore=ignored)
    with pytest.raises(DataError, match=r"(?s)task gsm8k needs a chat template.*plain=True"):
        run([bare], ["gsm8k"], out, data={"gsm8k": rows})
    assert not out.exists()
    report = run([bare], ["gsm8k"], out, data={"gsm8k": rows}, plain=True)
    assert "the whole set has 1319" in report.notices[0]


def test_cut_completions_are_counted_and_told(specialists, sums, tmp_path):
    task = write_task(tmp_path, sums, max_new_tokens=1)
    report = run([specialists["math"]], [task], tmp_path / "out")
    counts = report.tasks[0].counts[0]
    assert counts.cut > 0
    assert f"{counts.cut} of 40 completions cut (most tokens: 1)" in report.notices[0]
    cut = [
        row for row in kept_answers(tmp_path / "out", "sums", "math") if row["finish"] == "length"
    ]
    assert len(cut) == counts.cut
    assert {row["grade"] for row in cut} == {"wrong"}  # judged as they are
    assert run([specialists["math"]], [task], tmp_path / "out", max_new_tokens=24).notices == ()


def test_too_little_memory_is_named(specialists, sums, tmp_path, monkeypatch):
    def full(*_):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")

    task = write_task(tmp_path, sums[:2])
    for place, told in (
        ("generate", r"(?s)0 of 2 completions \(out of memory\).*`batch_size`.*fewer processes"),
        ("__init__", r"(?s)does not fit into the free memory.*fewer processes"),
    ):
        monkeypatch.setattr(TransformersEngine, place, full)
        with pytest.raises(ResourceError, match=told):
            run([specialists["math"]], [task], tmp_path / "out")


def test_an_engine_that_dies_loses_nothing(specialists, sums, tmp_path, monkeypatch):
    task, out = write_task(tmp_path, sums), tmp_path / "out"
    whole = TransformersEngine.generate

    def dies(self, wanted):
        made = whole(self, wanted)
        for _ in range(7):
            yield next(made)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with monkeypatch.context() as patched:
        patched.setattr(TransformersEngine, "generate", dies)
        with pytest.raises(ResourceError, match=r"(?s)stopped after 7 of 40.*illegal.*kept"):
            run([specialists["math"]], [task], out)
    wanted = []
    with monkeypatch.context() as patched:
        patched.setattr(
            TransformersEngine,
            "generate",
            lambda self, missing: wanted.extend(missing) or whole(self, missing),
        )
        resumed = run([specialists["math"]], [task], out)
    assert len(wanted) == 33
    unbroken = run([specialists["math"]], [task], tmp_path / "other")
    assert resumed.tasks[0].scores.tolist() == unbroken.tasks[0].scores.tolist()


@pytest.mark.parametrize("place", ["answers/sums/math.jsonl", "results.json"])
def test_a_link_in_place_of_a_result_is_replaced(specialists, sums, tmp_path, place):
    task, out, kept = write_task(tmp_path, sums[:2]), tmp_path / "out", tmp_path / "kept"
    kept.write_text("kept")
    (out / place).parent.mkdir(parents=True)
    (out / place).symlink_to(kept)
    run([specialists["math"]], [task], out)
    assert kept.read_text() == "kept"
    assert not (out / place).is_symlink()
    assert (out / place).read_text().startswith("{")


@pytest.mark.parametrize(
    "place", ["answers", "answers/sums", "judgements", "completions", "completions/math.jsonl"]
)
def test_results_are_not_written_through_a_link(specialists, sums, tmp_path, place):
    task, out, kept = write_task(tmp_path, sums[:2]), tmp_path / "out", tmp_path / "kept"
    kept.mkdir()
    link = out / place
    if place == "completions/math.jsonl":
        run([specialists["math"]], [task], out)
        (link,) = (out / "completions").glob("*.jsonl")
        link.unlink()
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(kept)
    with pytest.raises(DataError, match="cannot be written"):
        run([specialists["math"]], [task], out)
    assert not list(kept.iterdir())


def test_a_folder_in_place_of_completions_or_their_index_is_refused(specialists, sums, tmp_path):
    task, out = write_task(tmp_path, sums[:2]), tmp_path / "out"
    run([specialists["math"]], [task], out)
    (index,) = (out / "completions").glob("*.json")
    (out / "completions" / "other-0.json").write_text(index.read_text())  # without completions
    assert run([specialists["math"]], [task], out, rescore=True).rows
    for path, message in ((index.with_suffix(".jsonl"), "written"), (index, "read")):
        path.unlink()
        path.mkdir()
        with pytest.raises(DataError, match=f"{path.name} cannot be {message}"):
            run([specialists["math"]], [task], out, rescore=True)


def test_a_merge_knows_its_base_and_sources_among_the_models(specialists, sums, tmp_path):
    base, math = bundled_set().base, specialists["math"]
    config = {"merge_method": "ties", "base_model": str(base), "parameters": {"weight": 0.5}}
    models = [{"model": str(specialists[name])} for name in ("math", "chat")]
    moemerge.merge({**config, "models": models}, tmp_path / "merged", device="cpu")
    task = write_task(tmp_path, sums[:6])
    (tmp_path / "link").symlink_to(base)
    report = run([tmp_path / "link", tmp_path / "merged", math], [task], tmp_path / "out")
    assert report.inputs == {"merged": {"link": "base", "math": "source"}}
    assert [text.split(" (p")[0].split(":")[0] for text in report.verdicts] == [
        "merged is not distinguishable from the base, link",
        "merged is not distinguishable from its source, math",
    ]
    assert report.headline == report.verdicts[0]
    page = render_scores(page_document(report, [], {"moemerge": "0", "created": "now"}))
    assert all(text in page for text in report.verdicts)


def test_a_key_in_a_url_is_not_stored(specialists, sums, tmp_path):
    task, out = write_task(tmp_path, sums[:2]), tmp_path / "out"
    run([specialists["math"]], [task], out)
    run([], [task], out, rescore=True, url=["https://user:secret@host/v1?key=secret"])
    text = (out / "results.json").read_text()
    assert "https://host/v1" in text
    assert "secret" not in text
