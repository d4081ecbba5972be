"""`--sample`: a short completion by each model, after the work is done."""

from __future__ import annotations

from pathlib import Path

from moemerge import api
from moemerge.testbed import bundled_set
from processes import moemerge


def test_each_model_completes_each_prompt(tmp_path: Path) -> None:
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
    assert done.returncode == 2
    assert "the prompt is empty" in done.stderr
    assert not (tmp_path / "b").exists()
    for file in out.glob("tokenizer*"):
        file.unlink()
    assert "could not run" in api.sample({"OUT": out}, ["hello"])["OUT"][0]
