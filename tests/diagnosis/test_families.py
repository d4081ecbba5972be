"""A model is diagnosed as itself in every family; those that cannot be are refused."""

from dataclasses import replace

import pytest
import transformers

import moemerge
import multimodal_zoo
import zoo
from moemerge.errors import ArchitectureError
from moemerge.families.opened import open_model
from repairs.calibration import cases

REFUSED = ("zaya", "doge")
EVERY = (*zoo.FAMILIES, *multimodal_zoo.FAMILIES)
SERVED = zoo.by_kind(name for name in EVERY if name not in REFUSED)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return cases.write_text(tmp_path_factory.mktemp("text") / "math.jsonl", seed=1, rows=4)


@pytest.mark.parametrize("family", SERVED)
def test_a_model_routes_exactly_as_itself(family, zoo_folder, text):
    folder = zoo_folder(family, tokenizer=True)
    found = moemerge.diagnose(folder, sources={"math": folder}, data={"math": text}, device="cpu")
    places = open_model("m", folder).architecture.routers()
    assert [row.router for row in found.layers] == [p.weight for p in places if p.served]
    for row in found.layers:
        assert (row.mismatch, row.any_mismatch, row.mismatch_on_features) == (0, 0, 0)
        assert (row.kl, row.kl_on_features, row.quadratic, row.drift) == (0, 0, 0, 0)
        assert (row.top1_agreement, row.weighted_overlap, row.shift_small) == (1, 1, 1)
        assert (row.flow, row.dead, row.overloaded) == ((), (), ())
        assert row.load == row.load_source
        assert sum(row.load) == pytest.approx(1)
    total = found.total("math")
    assert (total.any_mismatch, total.mismatched_per_token) == (0, 0)
    assert total.loss == total.loss_source
    assert found.verdict.words == "The model routes exactly as its sources do."


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_cannot_be_served_is_refused(family, zoo_folder, text):
    folder = zoo_folder(family, tokenizer=True)
    with pytest.raises(ArchitectureError, match=f"routers of {family} cannot be diagnosed"):
        moemerge.diagnose(folder, sources={"math": folder}, data={"math": text})


def test_a_dense_model_is_refused(tmp_path, text):
    dense = zoo.dense_llama(tmp_path / "dense")
    with pytest.raises(ArchitectureError, match="no experts, so there is no router to diagnose"):
        moemerge.diagnose(dense, sources={"math": dense}, data={"math": text})


def test_routers_that_are_not_compared_are_told(zoo_folder, text):
    folder = zoo_folder("deepseek_v4", tokenizer=True)
    found = moemerge.diagnose(folder, sources={"math": folder}, data={"math": text})
    assert {row.layer for row in found.layers} == {1, 2}
    assert any("layer 0" in notice and "table" in notice for notice in found.notices)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "granitemoe"])
def test_a_model_stored_otherwise_than_its_sources(family, zoo_folder, tmp_path, text):
    """Merged by a tool that writes fused experts, from sources with one tensor per expert."""
    source = zoo_folder(family)
    merged = zoo.tiny_tokenizer(zoo.perturb(source, tmp_path / "merged", seed=3, scale=0.3))
    fused = tmp_path / "fused"
    with zoo._quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(merged)
        model.save_pretrained(fused, save_original_format=False)
    zoo.tiny_tokenizer(fused)
    assert zoo.tensors(fused).keys() != zoo.tensors(merged).keys()
    given = {"sources": {"math": source}, "data": {"math": text}, "swaps": True}
    plain, other = moemerge.diagnose(merged, **given), moemerge.diagnose(fused, **given)
    for one, two in zip(plain.layers, other.layers, strict=True):
        assert replace(one, router="") == replace(two, router="")
    assert plain.totals == other.totals
    assert plain.swaps == other.swaps
    assert plain.total("math").mismatch > 0


NEAR = ("kl", "kl_on_features", "quadratic", "weighted_overlap", "drift", "logit_shift")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "gpt_oss"])
def test_a_gpu_finds_what_a_cpu_finds(family, case_of):
    case = case_of(family)
    cpu, gpu = (case.diagnose(swaps=True, dtype="float32", device=d) for d in ("cpu", "cuda"))
    for one, two in zip(cpu.layers, gpu.layers, strict=True):
        for name in NEAR:
            assert getattr(two, name) == pytest.approx(getattr(one, name), rel=1e-3), name
        # A token at a near tie may go the other way.
        assert two.mismatch == pytest.approx(one.mismatch, abs=0.01)
    for one, two in zip(cpu.swaps, gpu.swaps, strict=True):
        assert two.loss == pytest.approx(one.loss, rel=1e-4)
