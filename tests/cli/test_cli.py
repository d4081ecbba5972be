"""The commands as a user meets them: output, messages and exit codes."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import zoo
from moemerge import __version__ as moemerge_version
from processes import COMMAND, environment, fresh, moemerge, start


@pytest.fixture
def config(models, tmp_path):
    base, a, b = models
    path = tmp_path / "ties.yml"
    path.write_text(
        f"merge_method: ties\nbase_model: {base}\nmodels:\n"
        f"  - {{model: {a}, parameters: {{weight: 0.4, density: 0.6}}}}\n"
        f"  - {{model: {b}, parameters: {{weight: 0.6, density: 0.6}}}}\n"
    )
    return path


def refused(result, code, *words):
    """One message of ours on stderr, its exit code, no traceback, nothing on stdout."""
    assert result.returncode == code, result.stderr
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    for word in words:
        assert word in result.stderr


def test_merge_writes_a_folder_and_says_so(config, tmp_path):
    result = fresh("merge", config, tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert "ties" in result.stdout
    assert (tmp_path / "out" / "config.json").exists()
    assert result.stderr == ""  # no terminal: no bar


def test_json_is_one_document_on_stdout(config, tmp_path):
    result = moemerge("merge", config, tmp_path / "out", "--json", "-")
    assert json.loads(result.stdout)["output"]["folder"] == str(tmp_path / "out")
    result = moemerge("validate", config, "--json", tmp_path / "plan.json")
    assert "ready to run" in result.stdout
    assert json.loads((tmp_path / "plan.json").read_text())["method"] == "ties"
    refused(moemerge("validate", config, "--json", tmp_path), 2, "--json")


def test_dry_run_and_validate_write_nothing(config, tmp_path):
    before = sorted(tmp_path.iterdir())
    for args in (("merge", config, tmp_path / "out", "--dry-run"), ("validate", config)):
        result = moemerge(*args)
        assert result.returncode == 0, result.stderr
        assert "nothing was written" in result.stdout
    assert sorted(tmp_path.iterdir()) == before


def test_existing_output_needs_overwrite(config, tmp_path):
    first = moemerge("merge", config, tmp_path / "out", "-q")
    assert (first.returncode, first.stdout, first.stderr) == (0, "", "")
    refused(moemerge("merge", config, tmp_path / "out"), 3, "exists", "--overwrite")
    assert moemerge("merge", config, tmp_path / "out", "--overwrite").returncode == 0


def test_bad_configs_exit_2_with_every_problem(tmp_path, config):
    text = config.read_text().replace("ties", "tiess")
    config.write_text(text + "router: {keep: nobody}\n")
    refused(moemerge("merge", config, tmp_path / "out"), 2, "line 1", "'ties'", "line 6", "nobody")
    refused(moemerge("merge", tmp_path / "none.yml", tmp_path / "out"), 2, "none.yml")
    assert not (tmp_path / "out").exists()


def test_missing_inputs_are_reported_with_other_problems(tmp_path, config):
    text = config.read_text().replace("m1,", "gone,")
    config.write_text(text)
    refused(moemerge("validate", config), 3, "gone does not exist")  # alone: by what opens it
    repair = f"refit: {{data: {{gone: {tmp_path}/none.jsonl, m2: {tmp_path}/none.txt}}}}\n"
    config.write_text(text + repair)
    words = ("3 problems", "line 4: models[0].model: the model folder", "line 6: refit.data.gone")
    refused(moemerge("validate", config), 2, *words, "line 6: refit.data.m2")
    # A model of the hub is not looked up, and text to be generated need not exist.
    recipe = f"{{file: {tmp_path}/made.jsonl, prompts: org/prompts, verify: math}}"
    repair = f"refit: {{data: {{gone: {recipe}, b: {recipe}}}}}\nrouter: {{keep: x}}\n"
    config.write_text(text.replace(str(tmp_path / "m2"), "org/b") + repair)
    result = moemerge("run", config, tmp_path / "out")
    refused(result, 2, "2 problems", "gone does not exist", "line 7: router")


def test_lenient_warns_instead(tmp_path, config):
    config.write_text(config.read_text() + "normalize: true\n")
    for verb in ("validate", "run", "merge"):
        out = () if verb == "validate" else (tmp_path / "out",)
        result = moemerge(verb, config, *out)
        refused(result, 2, "normalize", "parameters", "ignores this: --lenient warns")
        assert result.stderr.count("--lenient") == 1
    result = moemerge("coefficients", "acm", config, tmp_path / "c.yml")  # has no such flag
    assert "normalize" in result.stderr
    assert "--lenient" not in result.stderr
    result = moemerge("validate", config, "--lenient")
    assert result.returncode == 0
    assert "normalize" in result.stderr


def test_broken_checkpoints_exit_3(config, models, tmp_path):
    file = models[1] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(moemerge("merge", config, tmp_path / "out"), 3, "model.safetensors")
    assert not list(tmp_path.glob("*out*"))


def test_nan_exits_4(config, models, tmp_path):
    with zoo.edited(models[2]) as tensors:
        tensors["lm_head.weight"][0] = torch.nan
    refused(moemerge("merge", config, tmp_path / "out"), 4, "lm_head.weight", "--allow-nonfinite")
    assert not list(tmp_path.glob("*out*"))


def test_wrong_usage_exits_2(config, tmp_path):
    for args in (("merge",), ("merge", config, tmp_path / "out", "--nonsense"), ("mergee",)):
        result = moemerge(*args)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
    refused(moemerge("merge", config, tmp_path / "o", "--device", "tpu"), 2, "tpu", "auto, cpu")
    refused(moemerge("merge", config, tmp_path / "o", "--out-shard-size", "big"), 2, "big")


def test_notes_and_json_come_out_as_they_are(tmp_path):
    """Tokens such as [/INST] are no markup, and :b: is no picture."""
    folder = tmp_path / "a:b:c"
    zoo.tiny_tokenizer(folder, extra_words=("[/INST]",))
    zoo.dense_llama(folder)
    zoo.tiny_tokenizer(tmp_path / "other", extra_words=("[/OTHER]",))
    zoo.dense_llama(tmp_path / "other", seed=1)
    path = tmp_path / "union.yml"
    path.write_text(
        "merge_method: linear\nparameters: {weight: 1}\ntokenizer_source: union\n"
        f"models: [{{model: '{folder}'}}, {{model: '{tmp_path / 'other'}'}}]\n"
    )
    result = moemerge("validate", path, "--json", "-")
    assert result.returncode == 0, result.stderr
    assert "'[/OTHER]'" in result.stderr
    assert json.loads(result.stdout)["inputs"]["a:b:c"]["model"] == str(folder)


def test_a_reader_that_leaves_is_no_error():
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "moemerge", "ls", "methods"]
    with os.fdopen(write, "wb") as out:
        result = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=60)
    assert (result.returncode, result.stderr) == (0, b"")


def test_inspect_and_ls(models):
    shown = moemerge("inspect", models[0])
    assert shown.returncode == 0
    assert "OLMoE" in shown.stdout
    assert json.loads(moemerge("inspect", models[0], "--json").stdout)["experts"] == 8
    refused(moemerge("inspect", models[0] / "nowhere"), 3, "nowhere")
    methods = json.loads(moemerge("ls", "methods", "--json").stdout)
    assert {"ties", "wudi", "linear"} <= {m["method"] for m in methods}
    families = json.loads(moemerge("ls", "architectures", "--json").stdout)
    assert len(families) >= len(zoo.FAMILIES)


def test_inspect_verifies_checksums(config, tmp_path):
    out = tmp_path / "out"
    moemerge("merge", config, out)
    sound = moemerge("inspect", out, "--verify")
    assert (sound.returncode, sound.stderr) == (0, "")
    assert "files as written" in sound.stdout
    (out / "config.json").write_text("{}")
    refused(moemerge("inspect", out, "--verify"), 3, "changed: config.json")
    shown = moemerge("inspect", out, "--verify", "--json")
    assert (shown.returncode, json.loads(shown.stdout)["changed"]) == (3, ["config.json"])
    refused(moemerge("inspect", tmp_path, "--verify"), 3, "moemerge_report.json is missing")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_merge_leaves_nothing(models, tmp_path, number, code):
    """WUDI with very many steps: long enough to be interrupted in the middle."""
    base, a, b = models
    config = tmp_path / "wudi.yml"
    config.write_text(
        f"merge_method: wudi\nbase_model: {base}\nmodels: [{{model: {a}}}, {{model: {b}}}]\n"
        "parameters: {steps: 100000}\n"
    )
    process = start(COMMAND, "merge", config, tmp_path / "out", env=environment())
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".out.partial*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert not list(tmp_path.glob("*out*"))


def test_the_version_and_what_a_bug_report_needs():
    short = fresh("--version")
    assert short.returncode == 0
    assert short.stdout.split() == ["moemerge", moemerge_version]
    assert len(short.stdout.splitlines()) == 1
    for flags in (("--version", "-v"), ("-v", "--version")):
        long = moemerge(*flags)
        assert long.returncode == 0, long.stderr
        assert {"moemerge", "python", "system", "torch", "transformers"} <= {
            line.split()[0] for line in long.stdout.splitlines()
        }


def test_verbose_logs_what_is_read_and_planned(config, models, tmp_path):
    quiet = moemerge("validate", config)
    assert quiet.stderr == ""
    result = moemerge("validate", config, "-v")
    assert result.returncode == 0, result.stderr
    assert f"moemerge.checkpoint.reader: opened {models[1]}: " in result.stderr
    assert "moemerge.merging.run: planned " in result.stderr
    assert " by ties, " in result.stderr


def test_habits_of_mergekit_users(config, tmp_path):
    flags = ["--copy-tokenizer", "--lazy-unpickle", "--trust-remote-code", "--no-cuda"]
    done = moemerge("merge", config, tmp_path / "out", "--dry-run", *flags)
    assert done.returncode == 0, done.stderr
    assert "note: --lazy-unpickle is ignored: tensors are always read one by one" in done.stderr
    assert "--device=cpu here" in done.stderr
    refused(moemerge("merge", tmp_path / "out", config), 2, "given as the output", "moemerge merge")
    refused(moemerge("prune", "m", "out", "--data", "a=b", "--keep", "75"), 2, "75 percent", "0.75")
