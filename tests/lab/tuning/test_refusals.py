"""What is refused, and that nothing is left then."""

import json

import pytest
import torch

import quantised_zoo as qz
import zoo
from lab.tuning.cases import make_base, rows, tune
from moemerge.errors import (
    ArchitectureError,
    CheckpointError,
    DataError,
    NumericalError,
    ResourceError,
    UsageError,
)
from moemerge.lab.tuning import output
from moemerge.lab.tuning.settings import TuningSettings
from terminal import moemerge, succeed


def left(folder):
    return {p.name for p in folder.iterdir()}


def test_a_loss_that_is_no_number_ends_it(base, tmp_path):
    with pytest.raises(NumericalError, match="of step 2 is"):
        tune(base, tmp_path / "out", learning_rate=1e30, warmup=0.0, clip=1e30, save_every=1)
    assert left(tmp_path) == {"base"}


def test_a_base_with_nan_is_named(base, tmp_path):
    with zoo.edited(base) as tensors:
        tensors["model.norm.weight"][3] = torch.nan
    with pytest.raises(NumericalError, match=r"model\.norm\.weight holds NaN"):
        tune(base, tmp_path / "out")
    assert left(tmp_path) == {"base"}


def test_rows_without_answers_are_refused(base, tmp_path):
    with pytest.raises(DataError, match="no answer to learn in 1 row "):
        tune(base, tmp_path / "out", data=[{"prompt": "what is one"}])
    with pytest.raises(DataError, match="no such file"):
        tune(base, tmp_path / "out", data=["nowhere.jsonl"])


def test_a_quantised_base_is_refused(base, tmp_path):
    fp8 = qz.convert(base, tmp_path / "fp8", qz.fp8_config(8, 8), qz.block_fp8(8, 8))
    with pytest.raises(ArchitectureError, match="is quantised, and training needs floats"):
        tune(fp8, tmp_path / "out")


def test_an_output_that_exists_is_refused_before_training(base, tmp_path):
    tune(base, tmp_path / "out", steps=1)
    with pytest.raises(CheckpointError, match="exists"):
        tune(base, tmp_path / "out", steps=1)
    tune(base, tmp_path / "out", steps=1, overwrite=True)


def test_a_small_disk_is_refused(base, tmp_path, monkeypatch):
    monkeypatch.setattr(output, "STATE_BYTES", 2**50)
    with pytest.raises(ResourceError, match="are free there"):
        tune(base, tmp_path / "out")
    assert left(tmp_path) == {"base"}


def test_without_the_extra_it_says_what_to_install(base, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r'pip install "moemerge\[tune\]"'):
        tune(base, tmp_path / "out")


@pytest.mark.parametrize(
    ("family", "how"), [("llama4_text", {}), ("granitemoe", {"aux_loss": 0.1})]
)
def test_what_trl_cannot_train_is_said_at_the_first_step(family, how, zoo_folder, tmp_path):
    base = make_base(zoo_folder(family), tmp_path / "base")
    with pytest.raises(ArchitectureError, match="trl cannot train this model with these settings"):
        tune(base, tmp_path / "out", steps=1, **how)
    assert left(tmp_path) == {"base"}


def test_a_balancing_loss_needs_a_family_that_has_one(zoo_folder, tmp_path):
    with pytest.raises(ArchitectureError, match="no load-balancing loss"):
        tune(zoo_folder("deepseek_v3"), tmp_path / "out", aux_loss=0.1)


def test_a_preset_gives_way_to_what_is_given():
    paper = TuningSettings(preset="paper", epochs=1.0).resolved()
    assert (paper.epochs, paper.max_length, paper.packing) == (1.0, 4096, True)
    assert paper.learning_rate == 2e-5
    assert TuningSettings(lora=8).resolved().learning_rate == 2e-4
    assert TuningSettings(lora=8).resolved().lora_alpha == 16.0


def test_the_command_line(base, tmp_path):
    file = zoo.write_rows(tmp_path / "rows.jsonl", rows())
    words = ["tune", base, tmp_path / "out", "--data", file, "--batch", "8"]
    result = succeed(*words, "--steps", "2", "--json", tmp_path / "r.json")
    assert "2 (0.5 epochs)" in result.output
    assert json.loads((tmp_path / "r.json").read_text())["steps"] == 2
    assert moemerge(*words, "--learnin-rate", "1").exit_code == 2
    diverged = [*words, "--steps", "3", "--overwrite", "--learning-rate", "1e30"]
    result = moemerge(*diverged, "--warmup", "0", "--clip", "1e30")
    assert result.exit_code == 4, result.output
    assert (tmp_path / "out/config.json").exists()
