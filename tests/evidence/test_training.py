"""Training writes complete sets, is reproducible, and resumes after a kill."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evidence import training
from evidence.__main__ import main
from evidence.finetuning import finetune
from evidence.layout import router_slice
from evidence.scoring import accuracy, load_flat
from evidence.training import Job, train
from moemerge.errors import CheckpointError, UsageError
from moemerge.lab.testbed import open_set
from moemerge.lab.testbed.tasks import problems
from moemerge.runtime.progress import Silent


def files(folder):
    """Return every file but the manifest, which has a date."""
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "testbed.json"
    }


class Killed(Silent):
    """Ends the training after a number of reports."""

    def __init__(self, after):
        self.left = after

    def advance(self, amount):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def test_a_set_is_complete_and_loads_with_transformers(trained):
    assert open_set(trained.folder) == trained
    assert [p.name for p in trained.folder.parent.iterdir()] == [trained.folder.name]
    rows = [json.loads(line) for line in trained.data["code"].read_text().splitlines()]
    drawn = problems("code", split="train", count=len(rows), seed=0)
    assert rows == [{"prompt": p.prompt, "response": p.answer} for p in drawn]
    turns = [
        {"role": "user", "content": drawn[0].prompt},
        {"role": "assistant", "content": drawn[0].answer},
    ]
    for folder in (trained.base, *trained.models.values()):
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer.apply_chat_template(turns, return_dict=False)
        assert tokenizer.decode(ids) == drawn[0].prompt + drawn[0].answer + "<eos>"
        assert ids[-1] == model.config.eos_token_id
        assert model.config.vocab_size > max(ids)
    manifest = trained.manifest
    assert manifest["command"] == (
        "python -m evidence train --preset tiny --regime soft --arch olmoe --seed 0 "
        "--steps-scale 0.002 --device cpu olmoe-tiny-soft-0"
    )
    assert manifest["steps"] == {"base": 5, "specialist": 1}
    assert manifest["accuracy"].keys() == {"base", "math", "code", "chat"}
    assert manifest["moved"]["math"]["routers"] > 5 * manifest["moved"]["math"]["weights"] > 0


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_with_other_jobs(trained, tmp_path):
    jobs = [
        Job(tmp_path / "other", "tiny", seed=4, steps_scale=0.002),
        Job(tmp_path / "same", "tiny", steps_scale=0.002),
        Job(tmp_path / "plain", "tiny", "plain", steps_scale=0.002),
    ]
    other, same, plain = train(jobs, device="cpu")
    assert files(same.folder) == files(trained.folder)
    assert files(plain.base) == files(trained.base)  # one base for two regimes
    assert files(plain.models["math"]) != files(trained.models["math"])
    assert files(other.base) != files(trained.base)


def test_a_killed_training_resumes_to_the_same_bytes(trained, train_set, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr("evidence.optimise._REPORT_EVERY", 2)
    out = tmp_path / trained.folder.name
    with pytest.raises(KeyboardInterrupt):
        train_set(out, Killed(after=2))
    assert not out.exists()
    assert list(tmp_path.iterdir())
    train_set(out)
    assert files(out) == files(trained.folder)
    assert list(tmp_path.iterdir()) == [out]


def test_a_finished_set_is_not_trained_again_and_another_is_refused(trained, train_set):
    assert train_set(trained.folder) == trained
    with pytest.raises(CheckpointError, match="exists"):
        train_set(trained.folder, regime="plain")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"preset": "smal"}, "did you mean 'small'"),
        ({"regime": "hard"}, "soft, plain"),
        ({"arch": "mixtral"}, "olmoe, qwen3_moe"),
        ({"domains": ("math", "math")}, "each once"),
        ({"seed": -1}, "seed"),
        ({"steps_scale": 0.0}, "scale above 0"),
    ],
)
def test_wrong_settings_are_refused_before_any_work(wrong, words, train_set, tmp_path):
    with pytest.raises(UsageError, match=words):
        train_set(tmp_path / "x", **wrong)
    with pytest.raises(CheckpointError, match="not a set of models"):
        open_set(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_model_learns(train_set, tmp_path):
    """Sixty steps on a few problems are enough to memorise them."""
    start = train_set(tmp_path / "set", arch="qwen3_moe", domains=("chat",))
    drawn = problems("chat", split="train", count=8, seed=0, hard=False)
    assert not any(accuracy(start.base, drawn, device="cpu"))
    out = finetune(start.base, tmp_path / "tuned", drawn, steps=60, lr=4e-3, device="cpu", batch=16)
    assert sum(accuracy(out, drawn, device="cpu")) >= 6
    flat, shape = load_flat(out)
    before, _ = load_flat(start.base)
    routers = router_slice(shape)
    assert not torch.equal(flat[routers], before[routers])


def test_the_command_trains_and_prints_accuracies(tmp_path, capsys):
    flags = ["--preset", "tiny", "--domain", "chat", "--steps-scale", "0.0008", "--device", "cpu"]
    assert main(["train", *flags, str(tmp_path / "set")]) == 0
    assert "chat: chat " in capsys.readouterr().out
    assert main(["train", *flags, "--regime", "plain", str(tmp_path / "set")]) == 3
    assert "exists" in capsys.readouterr().err
