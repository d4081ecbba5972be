"""A quantised model is refitted as its dequantised copy is, and written in floats or as it was."""

import pytest
import torch

import moemerge
import quantised_zoo as qz
import zoo
from collecting.direct import whole_model
from moemerge.checkpoint.patch import CheckpointPatch
from moemerge.errors import UsageError
from repairs.calibration.cases import changed_tensors
from repairs.refitting.cases import Case, make_case
from terminal import succeed

SETTINGS = {"ridge": 0.01, "holdout": 0.2, "router": "keep"}


@pytest.fixture(scope="module")
def plain(zoo_folder, tmp_path_factory):
    base = zoo_folder("qwen3_moe", num_hidden_layers=2, dtype=torch.bfloat16)
    return make_case(base, tmp_path_factory.mktemp("case"), scale=0.3)


@pytest.fixture(scope="module")
def case(plain, tmp_path_factory):
    """The merged model in FP8, one of its sources in INT4."""
    folder = tmp_path_factory.mktemp("quantised")
    merged = qz.KINDS["qwen fp8"].publish(plain.merged, folder / "merged", shards=2)
    math = qz.convert(plain.sources["math"], folder / "math", qz.INT4, qz.packed(4, 8))
    return Case(merged, {**plain.sources, "math": math}, plain.data)


def test_floats_by_default(case, tmp_path):
    case.refit(tmp_path / "out", **SETTINGS)
    copy = qz.plain_copy(case.merged, tmp_path / "plain")
    Case(copy, case.sources, case.data).refit(tmp_path / "expected", **SETTINGS)
    zoo.assert_same(tmp_path / "out", tmp_path / "expected")
    assert "quantization_config" not in zoo.read_config(tmp_path / "out")


def test_written_back_as_it_was(case, tmp_path):
    report = case.refit(tmp_path / "out", requantize="same", **SETTINGS)
    assert zoo.read_config(tmp_path / "out") == zoo.read_config(case.merged)
    stored = {name: (t.shape, t.dtype) for name, t in zoo.tensors(tmp_path / "out").items()}
    assert stored == {n: (t.shape, t.dtype) for n, t in zoo.tensors(case.merged).items()}
    with moemerge.Checkpoint.open(case.merged) as merged:
        assert merged.quantisation is not None
        units = merged.quantisation.units
    (told,) = report.to_json()["requantised"].values()
    assert told["tensors"] == len(units)
    assert 0.005 < told["relative_error"] < 0.03  # of FP8, which has three bits of mantissa
    assert told["error_left"]["rounded"] > told["error_left"]["unrounded"] > 0


@pytest.mark.parametrize("kind", ["qwen fp8", "int4"])
def test_rounding_each_map_is_better_than_rounding_at_the_end(plain, kind, tmp_path):
    """Later maps make up for the rounding of earlier ones, as seen in the logits."""
    if kind == "int4":
        merged = qz.convert(plain.merged, tmp_path / "merged", qz.INT4, qz.packed(4, 8))
    else:
        merged = qz.KINDS[kind].publish(plain.merged, tmp_path / "merged")
    case = Case(merged, plain.sources, plain.data)
    settings = {"ridge": 0.01, "holdout": 0.0, "router": "keep"}
    case.refit(tmp_path / "each", requantize="same", **settings)
    case.refit(tmp_path / "floats", **settings)
    with (
        moemerge.Checkpoint.open(merged) as source,
        CheckpointPatch(source, tmp_path / "last", quantised="same") as patch,
    ):
        changed = changed_tensors(qz.plain_copy(merged, tmp_path / "plain"), tmp_path / "floats")
        tensors = zoo.tensors(tmp_path / "floats")
        for name in sorted(changed):
            patch.write(name, tensors[name])
        patch.commit()
    errors = {
        name: distance(qz.plain_copy(tmp_path / name, tmp_path / f"{name}-plain"), plain)
        for name in ("each", "last")
    }
    assert errors["each"] <= errors["last"]


def distance(model, case):
    """The mean squared distance of the logits from those of each source on its own text."""
    ours, total = whole_model(model), 0.0
    for name, rows in case.rows().items():
        theirs = whole_model(case.sources[name])
        for row in rows:
            with torch.no_grad():
                gap = ours(row[None]).logits - theirs(row[None]).logits
            total += float(gap.square().mean())
    return total


def test_a_plain_model_cannot_be_written_back(plain, tmp_path):
    with pytest.raises(UsageError, match="is not quantised"):
        plain.refit(tmp_path / "out", requantize="same", **SETTINGS)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def rounded_merge(plain, tmp_path_factory):
    """Merged from FP8 models by moemerge, and rounded to FP8 again."""
    folder = tmp_path_factory.mktemp("rounded")
    publish = qz.KINDS["qwen fp8"].publish
    fp8 = {name: publish(path, folder / name) for name, path in plain.sources.items()}
    for path in fp8.values():
        zoo.tiny_tokenizer(path)
    moemerge.merge(zoo.linear(fp8.values()), folder / "merged", requantize="same")
    return Case(folder / "merged", fp8, plain.data)


@pytest.mark.parametrize(
    ("job", "settings", "needed"),
    [
        ("calibrate", {}, " (with `--requantize same`)"),
        ("refit", {**SETTINGS, "requantize": "same"}, " (with `--requantize same`)"),
        ("refit", SETTINGS, ""),  # floats: the merge is taken as it is
    ],
)
def test_the_card_names_what_makes_it_again(rounded_merge, tmp_path, job, settings, needed):
    made = tmp_path / "made"
    sources, data = rounded_merge.sources, rounded_merge.data
    repair = getattr(moemerge, job)
    repair(rounded_merge.merged, made, sources=sources, data=data, measure=False, **settings)
    assert f"which makes this model again{needed}:" in (made / "README.md").read_text()
    flags = ["--requantize", "same"] if needed else []
    again = [made / "moemerge_config.yml", tmp_path / "again", "--no-measure"]
    succeed("run", *again, *flags)
    assert changed_tensors(made, tmp_path / "again") == set()
    if job == "calibrate":  # calibrated again, it is no merge of ours: taken as it is
        repair(made, tmp_path / "twice", sources=sources, data=data, measure=False)
        card = (tmp_path / "twice" / "README.md").read_text()
        assert "again (with `--requantize same`):" in card
        assert "passthrough" in card
