"""Training writes whole sets, the same for the same seed, and goes on after a kill."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from moemerge.errors import CheckpointError, UsageError
from moemerge.runtime.journals import saved_path
from moemerge.runtime.progress import Silent
from moemerge.testbed.accuracy import accuracy, load_flat
from moemerge.testbed.network.layout import ARCHITECTURES, router_mask
from moemerge.testbed.tasks import problems
from moemerge.testbed.training import Job, finetune, open_set, stacks, train_many
from moemerge.testbed.training import run as running
from moemerge.testbed.training.stacks import Saved
from testbed.one_set import train

SETTINGS = {
    "preset": "tiny",
    "regime": "soft",
    "arch": "olmoe",
    "seed": 3,
    "device": "cpu",
    "domains": ("math", "code"),
    "steps_scale": 0.002,  # five steps for the base, one for each specialist
}


@pytest.fixture(autouse=True)
def _few_problems(monkeypatch):
    monkeypatch.setattr(running, "TEST_PROBLEMS", 4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "TEST_PROBLEMS", 4)
        return train(tmp_path_factory.mktemp("sets") / "set", **SETTINGS)


def files(folder):
    """Every file but the manifest, which holds a date."""
    return {
        path.relative_to(folder): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "testbed.json"
    }


class Killed(Silent):
    """Ends the training after so many reports."""

    def __init__(self, after):
        self.left = after

    def advance(self, amount):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


def test_a_set_is_whole_and_loads_with_transformers(trained):
    assert sorted(p.name for p in trained.folder.iterdir()) == [
        "base", "code", "data", "math", "testbed.json",
    ]  # fmt: skip
    assert open_set(trained.folder) == trained
    for folder in (trained.base, *trained.models.values()):
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert model.config.model_type == "olmoe"
        row = json.loads(trained.data["math"].read_text().splitlines()[0])
        ids = AutoTokenizer.from_pretrained(folder)(row["text"])["input_ids"]
        assert ids[-1] == model.config.eos_token_id
        assert model.config.vocab_size > max(ids)
    told = trained.manifest
    assert told["command"] == (
        "moemerge testbed train --preset tiny --regime soft --arch olmoe --seed 3 "
        "--steps-scale 0.002 --domain math --domain code --device cpu set"
    )
    assert told["steps"] == {"base": 5, "specialist": 1}
    assert told["accuracy"].keys() == {"base", "math", "code"}
    assert told["moved"]["math"]["routers"] > 5 * told["moved"]["math"]["weights"] > 0
    assert not saved_path(trained.folder).exists()


def test_calibration_rows_are_training_problems(trained):
    rows = [json.loads(line)["text"] for line in trained.data["code"].read_text().splitlines()]
    asked = problems("code", split="train", count=len(rows), seed=3)
    assert rows == [p.prompt + p.answer + "<eos>" for p in asked]


def test_the_same_seed_gives_the_same_bytes_in_any_company(trained, tmp_path):
    rest = ("olmoe", 3, ("math", "code"), 0.002)
    other = Job(tmp_path / "other", "tiny", "soft", "olmoe", 4, ("math", "code"), 0.002)
    same = Job(tmp_path / "same", "tiny", "soft", *rest)
    plain = Job(tmp_path / "plain", "tiny", "plain", *rest)
    train_many([other, same, plain], device="cpu")
    assert files(same.out) == files(trained.folder)
    assert files(plain.out / "base") == files(trained.base)  # one base, two regimes
    assert files(plain.out / "math") != files(trained.models["math"])
    assert files(other.out / "base") != files(trained.base)


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_killed_training_goes_on_to_the_same_bytes(trained, tmp_path, monkeypatch, after):
    monkeypatch.setattr(stacks, "SAVE_SECONDS", 0.0)
    monkeypatch.setattr("moemerge.testbed.training.optimise._REPORT_EVERY", 2)
    out = tmp_path / "set"
    with pytest.raises(KeyboardInterrupt):
        train(out, **SETTINGS, progress=Killed(after))
    assert not out.exists()
    assert saved_path(out).exists()
    with pytest.raises(UsageError, match="seed"):
        train(out, **{**SETTINGS, "seed": 4}, resume=True)
    train(out, **SETTINGS, resume=True)
    assert files(out) == files(trained.folder)
    assert [p.name for p in tmp_path.iterdir()] == ["set"]


def test_sets_that_are_finished_are_not_made_again(trained, tmp_path):
    first = Job(trained.folder, "tiny", "soft", "olmoe", 3, ("math", "code"), 0.002)
    saved_path(trained.folder).mkdir()  # a kill in the very last moment
    assert train_many([first], device="cpu", resume=True) == [trained]
    assert not saved_path(trained.folder).exists()
    with pytest.raises(CheckpointError, match="exists"):
        train_many([first], device="cpu")
    another = Job(trained.folder, "tiny", "plain", "olmoe", 3, ("math", "code"), 0.002)
    with pytest.raises(CheckpointError, match="exists"):
        train_many([another], device="cpu", resume=True)
    with pytest.raises(UsageError, match="its own"):
        train_many([first, another], device="cpu")


def test_two_trainings_of_one_folder_are_refused(tmp_path):
    held = Saved(tmp_path / "set", {"jobs": []}, resume=False)
    with pytest.raises(CheckpointError, match="another training"):
        train(tmp_path / "set", **SETTINGS)
    held.remove()


def test_wrong_settings_are_refused_before_any_work(tmp_path, trained):
    for wrong, words in (
        ({"preset": "smal"}, "did you mean 'small'"),
        ({"regime": "hard"}, "soft, plain"),
        ({"arch": "mixtral"}, "olmoe, qwen3_moe"),
        ({"domains": ("math", "math")}, "each once"),
        ({"domains": ("maths",)}, "did you mean 'math'"),
        ({"seed": -1}, "seed"),
        ({"steps_scale": 0.0}, "`steps_scale` is 0"),
        ({"device": "abacus"}, "abacus"),
    ):
        with pytest.raises(UsageError, match=words):
            train(tmp_path / "x", **{**SETTINGS, **wrong})
    with pytest.raises(CheckpointError, match="exists"):
        train(trained.folder, **SETTINGS)
    with pytest.raises(CheckpointError, match="no trained set"):
        open_set(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_model_learns(arch, tmp_path):
    """Sixty steps on a few problems, which it then knows by heart."""
    start = train(tmp_path / "set", **{**SETTINGS, "arch": arch, "domains": ("chat",)})
    asked = problems("chat", split="train", count=8, seed=0, hard=False)
    assert not any(accuracy(start.base, asked, device="cpu"))
    out = finetune(start.base, tmp_path / "tuned", asked, steps=60, lr=4e-3, device="cpu", batch=16)
    assert sum(accuracy(out, asked, device="cpu")) >= 6
    flat, shape = load_flat(out)
    before, _ = load_flat(start.base)
    routers = router_mask(shape)
    assert not torch.equal(flat[routers], before[routers])


def test_a_model_that_cannot_be_finished_leaves_nothing(trained, tmp_path, monkeypatch):
    asked = problems("chat", split="train", count=2, seed=0, hard=False)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", fail)
    with pytest.raises(OSError, match="No space"):
        finetune(trained.base, tmp_path / "tuned", asked, steps=1, lr=1e-3, device="cpu", batch=2)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="no problems"):
        finetune(trained.base, tmp_path / "tuned", [], steps=1, lr=1e-3, device="cpu")
