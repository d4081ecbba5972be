"""`moemerge calibrate` and `moemerge run` as a user meets them."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

import processes
import zoo
from moemerge.runtime.journals import journal_path
from terminal import moemerge


def test_a_table_on_stdout_and_a_line_for_each_layer_on_stderr(case, tmp_path):
    result = moemerge("calibrate", case.merged, tmp_path / "out", *case.flags)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "model.safetensors").exists()
    title, *lines = result.stdout.splitlines()
    assert title == "before → after; routers alone: both on the merged model's features"
    assert lines[0].split() == ["KL", "KL", "mismatch", "mismatch"]
    assert lines[1].split() == ["layer", "steps", "residual", *case.sources, *case.sources]
    assert [line.split()[0] for line in lines[2:6]] == ["0", "1", "2", "mean"]
    assert all(len(line) <= 80 for line in lines[:6])
    assert ", 3 converged" in result.stdout
    base, start, *layers = result.stderr.splitlines()
    assert base.startswith("no source is the base model")
    assert start.startswith("calibrate reads ")
    assert [line[:7] for line in layers] == ["layer 0", "layer 1", "layer 2"]


def test_flags_reach_the_settings(case, tmp_path):
    result = moemerge(
        "calibrate", case.merged, tmp_path / "out", *case.flags, "--gamma", "0.2", "--layers",
        "last:1", "--curvature", "diagonal", "--init", "zero", "--max-tokens", "60", "--holdout",
        "0.2", "--preconditioner", "jacobi", "--rtol", "1e-5", "--max-steps", "500", "--seed", "3",
        "--device", "cpu", "--dtype", "float32", "--offload", "disk", "--max-length", "64",
        "--limit", "9", "--objective", "exact", "--targets", "source-features", "--strict",
        "--no-measure", "--weight", "math=3", "--json", "-",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    wanted = {
        "alpha": None, "gamma": 0.2, "layers": "last:1", "curvature": "diagonal", "init": "zero",
        "max_tokens": 60, "holdout": 0.2, "preconditioner": "jacobi", "rtol": 1e-5,
        "max_steps": 500, "seed": 3, "device": "cpu", "dtype": "float32", "offload": "disk",
        "max_length": 64, "limit": 9, "objective": "exact", "targets": "source-features",
        "strict": True, "measure": False, "group": None, "map": {},
    }  # fmt: skip
    assert report["settings"] == wanted
    assert report["weights"] == {"math": 1.5, "code": 0.5}
    assert len(report["layers"]) == 1


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--alpha", "2"], 2, "alpha: must be at most 1"),
        (["--alpha", "0.5", "--gamma", "1"], 2, "exclude each other"),
        (["--curvature", "ful"], 2, "did you mean 'full'"),
        (["--source", "x"], 2, "expected NAME=VALUE"),
        (["--source", "math=elsewhere"], 2, "'math' is given twice"),
        (["--data", "cod=x.jsonl"], 2, "did you mean 'code'"),
        (["--data", "math=x.jsonl"], 3, "no such file"),
        (["--max-steps", "1", "--strict"], 4, "did not converge"),
    ],
)
def test_errors_have_their_exit_codes(more, code, words, case, tmp_path):
    result = moemerge("calibrate", case.merged, tmp_path / "out", *case.flags, *more)
    assert result.exit_code == code, result.output
    assert result.stderr.splitlines()[-2:] != []
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "layers", "said"),
    [
        (None, "all", "no such file"),
        ("", "all", "the file is empty, expected rows of text"),
        ('{"text": "fine"}\n{"txt": "what"}\n', "all", "row 2: unknown form, keys found: 'txt'"),
        ('{"text": "fine"}\nnot json\n', "all", "row 2 is not valid JSON"),
        ('{"text": "fine"}\n', "3-9", "the model has 3 layers, 0 to 2"),
        ('{"text": "fine"}\n', "last:9", "layers, 0 to"),
    ],
)
def test_validate_checks_text_and_layers_of_a_repair(case, tmp_path, content, layers, said):
    if content is not None:
        (tmp_path / "text.jsonl").write_text(content)
    data = dict.fromkeys(case.sources, str(tmp_path / "text.jsonl"))
    config = zoo.linear(case.sources, data=data, calibration={"layers": layers})
    (tmp_path / "config.yml").write_text(json.dumps(config))
    for verb in (["validate"], ["run"]):
        out = [tmp_path / "out"] if verb == ["run"] else []
        result = moemerge(*verb, tmp_path / "config.yml", *out)
        assert result.exit_code in (2, 3), result.output
        assert said in " ".join(result.stderr.split()), result.stderr
        assert not (tmp_path / "out").exists()


def test_its_own_config_makes_a_run_again_from_anywhere(case, tmp_path, monkeypatch):
    for name, folder in case.sources.items():
        shutil.copytree(folder, tmp_path / name)
        zoo.tiny_tokenizer(tmp_path / name)
        shutil.copy(case.data[name], tmp_path / f"{name}.jsonl")
    names = list(case.sources)
    config = zoo.linear(names, data={name: f"{name}.jsonl" for name in names}, calibration={})
    (tmp_path / "configs").mkdir()  # models and text lie where the command is run, not here
    (tmp_path / "configs" / "config.yml").write_text(json.dumps(config))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    assert moemerge("run", "configs/config.yml", "out", "--alpha", "0.7").exit_code == 0
    merged = moemerge("merge", "configs/config.yml", "merged")
    assert "`calibration:` of the config is ignored" in merged.stderr
    assert "calibration" not in Path("merged/README.md").read_text()
    assert "calibration" not in Path("merged/moemerge_config.yml").read_text()
    flags = [f"--source={n}={n}" for n in names] + [f"--data={n}={n}.jsonl" for n in names]
    assert moemerge("calibrate", "merged", "later", "--alpha", "0.7", *flags).exit_code == 0
    monkeypatch.chdir(tmp_path / "elsewhere")
    for made in ("out", "later"):
        again = moemerge("run", f"../{made}/moemerge_config.yml", made)
        assert again.exit_code == 0, again.output
        for path in (tmp_path / made).glob("*.safetensors"):
            assert path.read_bytes() == Path(made, path.name).read_bytes()


def test_an_interrupted_calibration_can_be_resumed(case, tmp_path):
    """Ctrl-C once a layer is finished: exit code 130, and the same command continues."""
    out = tmp_path / "out"
    slow = ["--rtol", "1e-300", "--max-steps", "600", "--preconditioner", "none"]
    command = ["calibrate", case.merged, out, *case.flags, *slow]
    process = processes.start(processes.COMMAND, *command, env=processes.environment())
    deadline = time.monotonic() + 60
    while not (journal_path(out) / "0000.json").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
        if process.poll() is not None:
            break
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("the machine was faster than the signal")
    assert process.returncode == 130, errors
    assert "the same command continues" in errors
    assert not out.exists()
    finished = len(list(journal_path(out).glob("*.json"))) - 1
    result = moemerge("calibrate", case.merged, out, *case.flags, *slow)
    assert result.exit_code == 0, result.output
    assert f"resuming a killed run: {finished} routers are finished" in result.stderr
