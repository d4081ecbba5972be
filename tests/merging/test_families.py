"""Every family of the table merges, in every layout, and the result loads in transformers."""

import pytest
import torch
import transformers

import moemerge
import multimodal_zoo
import zoo
from merging.gathered import unit_tensors

WEIGHTS = (0.4, 0.6)


def config(method, base, models):
    parameters = [{"weight": w, "density": 0.5} for w in WEIGHTS]
    if method == "linear":
        parameters = [{"weight": w} for w in WEIGHTS]
    entries = [{"model": str(m), "parameters": p} for m, p in zip(models, parameters, strict=True)]
    settings = {"merge_method": method, "models": entries}
    return settings if method == "linear" else {**settings, "base_model": str(base)}


def load(folder):
    """transformers' own account of a load: keys that were missing or too many."""
    architecture = zoo.read_config(folder)["architectures"][0]
    _model, info = getattr(transformers, architecture).from_pretrained(
        folder, output_loading_info=True
    )
    return {k: sorted(map(str, info[k])) for k in ("missing_keys", "unexpected_keys")}


@pytest.mark.parametrize("model_type", [*zoo.FAMILIES, *multimodal_zoo.FAMILIES])
def test_every_family_merges_and_loads(zoo_folder, tmp_path, model_type):
    base = zoo_folder(model_type)
    models = [zoo.perturb(base, tmp_path / str(seed), seed) for seed in (1, 2)]
    inputs = [zoo.tensors(m) for m in models]
    out = tmp_path / "out"
    report = moemerge.merge(config("linear", base, models), out)
    merged = zoo.tensors(out)
    assert merged.keys() == inputs[0].keys()
    assert all(m.tensors == m.merged + sum(map(len, m.copied.values())) for m in report.models)
    assert load(out) == {"missing_keys": [], "unexpected_keys": []}
    for name, value in merged.items():
        if value.is_floating_point():
            expected = sum(w * t[name] for w, t in zip(WEIGHTS, inputs, strict=True))
            torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(value, inputs[0][name])


@pytest.mark.parametrize(
    ("method", "model_type"),
    [
        *(("ties", name) for name in ("olmoe", "mixtral", "gpt_oss", "deepseek_v3", "granitemoe")),
        ("dare_ties", "gpt_oss"),
        ("della", "gpt_oss"),
    ],
)
def test_the_unit_is_one_expert_whatever_the_layout(zoo_folder, tmp_path, model_type, method):
    """A per-tensor rule gives the same weights on fused and on per-expert checkpoints."""
    results = []
    for fused in (False, True):
        # Fine-tunes are far from each other expert by expert: a trim over a whole stack would keep
        # other elements.
        folders = [zoo_folder(model_type, seed=seed, fused=fused) for seed in (0, 1, 2)]
        out = tmp_path / f"{fused}-out"
        moemerge.merge(config(method, folders[0], folders[1:]), out)
        results.append(unit_tensors(out))
    assert results[0].keys() == results[1].keys()
    for key, value in results[0].items():
        assert torch.equal(value, results[1][key]), key


def test_layouts_may_be_mixed(zoo_folder, tmp_path):
    """A base in one layout and fine-tunes in another: the result has the base's layout."""
    plain = [zoo_folder("qwen3_moe", seed=seed, fused=False) for seed in (0, 1, 2)]
    mixed = [plain[0], zoo_folder("qwen3_moe", seed=1, fused=True), plain[2]]
    moemerge.merge(config("ties", plain[0], plain[1:]), tmp_path / "plain")
    moemerge.merge(config("ties", mixed[0], mixed[1:]), tmp_path / "mixed")
    zoo.assert_same(tmp_path / "plain", tmp_path / "mixed")
