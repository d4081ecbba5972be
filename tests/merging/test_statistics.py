"""Merges that know their models' inputs: every unit against a direct float64 computation."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import moemerge
import zoo
from merging.gathered import SEQUENCES, gather, regmean, unit_tensors
from moemerge.errors import CheckpointError, ConfigError, DataError, NumericalError

FAMILIES = ["olmoe", "qwen3_moe", "mixtral"]
TOKENS = {"math": 120, "code": 300}
FEW = {"math": {"layers.1.mlp.experts.3.": 0}, "code": {"layers.2.mlp.experts.5.": 4}}
MIN_TOKENS = 16
Q = "model.layers.0.self_attn.q_proj.weight"


def few_in(family, name):
    part = "block_sparse_moe" if family == "mixtral" else "mlp"
    return {key.replace("mlp", part): count for key, count in FEW[name].items()}


@pytest.fixture(scope="module")
def pair(zoo_folder, tmp_path_factory):
    """pair("olmoe", "gram"): two fine-tunes and their statistics; read only."""
    made = {}

    def build(family, kind="gram", *, fused=False):
        key = (family, kind, fused)
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            base = zoo_folder(family, fused=fused)
            found = {}
            for seed, name in enumerate(TOKENS, 1):
                model = zoo.perturb(base, folder / name, seed, scale=0.3)
                how = {"seed": seed, "tokens": TOKENS[name], "visits": few_in(family, name)}
                found[name] = model, gather(model, folder / f"{name}.stats", kind, **how)
            made[key] = found
        return made[key]

    return build


def config(method, pair, **more):
    return {
        "merge_method": method,
        "models": [{"model": str(model), "name": name} for name, (model, _) in pair.items()],
        "statistics": {name: str(stats.file) for name, (_, stats) in pair.items()},
        **more,
    }


def gram_of(stats, key):
    """The mean of x xᵀ over the tokens of a unit, and their number."""
    x = stats.inputs[key]
    return x.T @ x / max(1, len(x)), len(x)


def direct(key, weights, stats):
    own = [one[key] for one in weights]
    if key not in stats[0].inputs:
        return sum(own) / len(own)
    return regmean(own, [gram_of(s, key) for s in stats], [s.tokens for s in stats])


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_regmean_is_the_direct_computation_for_every_unit(pair, tmp_path, family, fused):
    models = pair(family, fused=fused)
    report = moemerge.merge(config("regmean", models), tmp_path / "out").to_json()
    merged = unit_tensors(tmp_path / "out")
    weights = [unit_tensors(model) for model, _ in models.values()]
    stats = [s for _, s in models.values()]
    assert len(merged) == len(weights[0]) >= 80
    for key, value in merged.items():
        expected = direct(key, weights, stats)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5, msg=key)
    few = report["remarks"]["few_tokens"]
    parts = {part for name in TOKENS for part in few_in(family, name)}
    assert few["count"] == 6  # three projections of each expert
    assert all(any(part in key for part in parts) for key in few["units"])
    assert {"math": 0, "code": 100} in few["units"].values()
    assert {"math": 40, "code": 4} in few["units"].values()
    assert any("6 units drawn towards the average" in n for n in report["notices"])
    told = report["statistics"]["math"]["gram"]
    assert told["tokens"] == 120
    assert told["file"] == str(stats[0].file)


def test_regmean_may_start_from_the_base(pair, zoo_folder, tmp_path):
    models = pair("olmoe")
    anchored = {"parameters": {"anchor": "base"}}
    with pytest.raises(ConfigError, match=r"'regmean' needs a base_model for `anchor: base`"):
        moemerge.merge(config("regmean", models, **anchored), tmp_path / "none")
    folder = zoo_folder("olmoe")
    base = {"base_model": str(folder)}
    out = moemerge.merge(config("regmean", models, **base, **anchored), tmp_path / "out").to_json()
    used = [part for part in out["inputs"].values() if part["model"] == str(folder)]
    assert [part["merged"] for part in used] == [used[0]["tensors"]]
    assert out["remarks"]["near_base"]["count"] == 6
    plain = moemerge.merge(config("regmean", models, **base), tmp_path / "plain").to_json()
    assert plain["remarks"]["few_tokens"]["count"] == 6
    stats = [s for _, s in models.values()]
    merged, average, origin = (
        unit_tensors(folder)
        for folder in (tmp_path / "out", tmp_path / "plain", zoo_folder("olmoe"))
    )
    for key, value in merged.items():
        seen = min((len(s.inputs[key]) for s in stats if key in s.inputs), default=MIN_TOKENS)
        close = torch.allclose(value, average[key], rtol=1e-4, atol=1e-4)
        assert close is (seen >= MIN_TOKENS), key
        if not close:
            nearer = (value - origin[key]).norm() < (average[key] - origin[key]).norm()
            assert nearer, key


@pytest.mark.parametrize("fused", [False, True], ids=["separate", "fused"])
@pytest.mark.parametrize("family", FAMILIES)
def test_fisher_is_the_direct_computation_for_every_unit(pair, tmp_path, family, fused):
    models = pair(family, "fisher", fused=fused)
    settings = config("fisher", models)
    settings["models"][0]["parameters"] = {"weight": 0.7}
    settings["models"][1]["parameters"] = {"weight": 0.3}
    report = moemerge.merge(settings, tmp_path / "out").to_json()
    merged = unit_tensors(tmp_path / "out")
    weights = [unit_tensors(model) for model, _ in models.values()]
    for key, value in merged.items():
        values = [s.fisher[key].double() / s.tokens for _, s in models.values()]
        floor = 1e-6 * (0.7 * values[0].mean() + 0.3 * values[1].mean())
        shares = [w * f.clamp(min=floor) for w, f in zip((0.7, 0.3), values, strict=True)]
        expected = sum(f * w[key] for f, w in zip(shares, weights, strict=True)) / sum(shares)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5, msg=key)
    assert report["remarks"]["unvisited"]["count"] == 3


def test_rows_of_one_token_are_no_sequences(pair, tmp_path):
    """The text may have more rows than the mean of squared gradients is over."""
    models = pair("olmoe", "fisher")
    model, stats = models["math"]
    rows = {"sequences": SEQUENCES + 20, "visits": few_in("olmoe", "math")}
    more = gather(model, tmp_path / "more.stats", "fisher", seed=1, tokens=TOKENS["math"], **rows)
    assert torch.equal(more.fisher[Q], stats.fisher[Q])
    moemerge.merge(config("fisher", models), tmp_path / "a")
    moemerge.merge(config("fisher", {**models, "math": (model, more)}), tmp_path / "b")
    assert torch.equal(unit_tensors(tmp_path / "a")[Q], unit_tensors(tmp_path / "b")[Q])


def test_statistics_of_one_layout_serve_the_other(zoo_folder, tmp_path):
    folders = [zoo_folder("olmoe", seed=s, fused=f) for s in (1, 2) for f in (False, True)]
    stats = [gather(folders[i], tmp_path / f"{i}.stats", seed=i) for i in (0, 2)]
    results = []
    for chosen in ((0, 2), (1, 3)):
        models = {name: (folders[i], s) for name, i, s in zip(TOKENS, chosen, stats, strict=True)}
        out = tmp_path / f"out{chosen[0]}"
        moemerge.merge(config("regmean", models), out)
        results.append(unit_tensors(out))
    assert results[0].keys() == results[1].keys()
    for key, value in results[0].items():
        assert torch.equal(value, results[1][key]), key


def test_what_the_statistics_lack_is_told(pair, tmp_path):
    models = pair("olmoe")
    model, _ = models["math"]
    noted = gather(model, tmp_path / "noted.stats", notices=["no Gram of what the head reads"])
    report = moemerge.validate(config("regmean", {**models, "math": (model, noted)}))
    assert "statistics of math: no Gram of what the head reads" in report.notices


def test_a_head_of_another_vocabulary_is_averaged_and_told(pair, zoo_folder, tmp_path):
    models = pair("olmoe", "fisher")
    found = {}
    for number, (name, (model, _)) in enumerate(models.items()):
        copy = shutil.copytree(model, tmp_path / name)
        zoo.tiny_tokenizer(copy, extra_words=("another",) * number)
        found[name] = (copy, gather(copy, tmp_path / f"{name}.stats", "fisher"))
    settings = config("fisher", found, tokenizer={"source": "union"})
    report = moemerge.merge(settings, tmp_path / "out").to_json()
    averaged = report["remarks"]["averaged"]["units"]
    assert averaged["lm_head.weight"] == {"why": "its rows were brought to another vocabulary"}


def test_layers_of_a_slice_are_each_sources_own(pair, tmp_path):
    models = pair("olmoe")
    (math, own), (code, others) = models.values()
    settings = config("regmean", models)
    del settings["models"]
    settings["slices"] = [
        {
            "sources": [
                {"model": str(math), "name": "math", "layer_range": [0, 2]},
                {"model": str(code), "name": "code", "layer_range": [1, 3]},
            ]
        }
    ]
    moemerge.merge(settings, tmp_path / "out")
    merged = unit_tensors(tmp_path / "out")
    tail = "mlp.experts.2.up_proj.weight"
    keys = [f"model.layers.{n}.{tail}" for n in (0, 1)]
    weights = [unit_tensors(math)[keys[0]], unit_tensors(code)[keys[1]]]
    grams = [gram_of(own, keys[0]), gram_of(others, keys[1])]
    expected = regmean(weights, grams, [own.tokens, others.tokens])
    torch.testing.assert_close(merged[keys[0]], expected, rtol=1e-5, atol=1e-5)


def test_routers_by_another_method_and_only_routers_by_this_one(pair, tmp_path):
    models = pair("olmoe")
    router = "model.layers.1.mlp.gate.weight"
    other = "model.layers.1.self_attn.q_proj.weight"
    weights = [unit_tensors(model) for model, _ in models.values()]
    stats = [s for _, s in models.values()]
    average = {key: (weights[0][key] + weights[1][key]) / 2 for key in (router, other)}
    linear = {"merge_method": "linear", "parameters": {"weight": 1.0}}
    report = moemerge.merge(config("regmean", models, router=linear), tmp_path / "a")
    merged = unit_tensors(tmp_path / "a")
    torch.testing.assert_close(merged[router], average[router], rtol=1e-5, atol=1e-6)
    expected = direct(other, weights, stats)
    torch.testing.assert_close(merged[other], expected, rtol=1e-5, atol=1e-5)
    assert report.router == "merged with linear"
    settings = config("linear", models, parameters={"weight": 1.0})
    moemerge.merge({**settings, "router": {"merge_method": "regmean"}}, tmp_path / "b")
    merged = unit_tensors(tmp_path / "b")
    expected = direct(router, weights, stats)
    torch.testing.assert_close(merged[router], expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged[other], average[other], rtol=1e-5, atol=1e-6)


def test_both_kinds_in_one_merge(pair, tmp_path):
    grams = pair("olmoe")
    models = {}
    for seed, (name, (model, _)) in enumerate(grams.items()):
        models[name] = model, gather(model, tmp_path / f"{name}.f", "fisher", seed=seed)
    settings = config("regmean", grams, router={"merge_method": "fisher"})
    settings["statistics"] = {
        name: [str(grams[name][1].file), str(models[name][1].file)] for name in models
    }
    report = moemerge.merge(settings, tmp_path / "out")
    assert set(report.statistics["math"]) == {"gram", "fisher"}
    merged = unit_tensors(tmp_path / "out")
    key = "model.layers.0.mlp.gate.weight"
    values = [s.fisher[key].double() for _, s in models.values()]
    weights = [unit_tensors(model)[key] for model, _ in models.values()]
    expected = sum(f * w for f, w in zip(values, weights, strict=True)) / sum(values)
    torch.testing.assert_close(merged[key], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("method", "kind"), [("regmean", "gram"), ("fisher", "fisher")])
def test_a_base_only_lends_its_config(pair, zoo_folder, tmp_path, method, kind):
    models = pair("olmoe", kind)
    base = zoo_folder("olmoe")
    plain = config(method, models)
    moemerge.merge(plain, tmp_path / "a")
    report = moemerge.merge({**plain, "base_model": str(base)}, tmp_path / "b")
    a, b = zoo.tensors(tmp_path / "a"), zoo.tensors(tmp_path / "b")
    assert all(torch.equal(value, b[name]) for name, value in a.items())
    told = {m.name: m for m in report.models}[base.name]
    assert told.merged == 0
    assert list(told.dropped) == [f"{method!r} merges the other models alone"]
    # a router's method may want it all the same
    router = {"merge_method": "task_arithmetic", "parameters": {"weight": 0.5}}
    report = moemerge.merge({**plain, "base_model": str(base), "router": router}, tmp_path / "c")
    assert {m.name: m for m in report.models}[base.name].merged == 3


def test_statistics_count_in_the_estimates(pair):
    models = pair("olmoe")
    plain = config("linear", models, parameters={"weight": 1.0})
    del plain["statistics"]
    without = moemerge.validate(plain)
    with_ = moemerge.validate(config("regmean", models))
    files = sum(s.file.stat().st_size for _, s in models.values())
    assert with_.bytes_read == without.bytes_read + files
    assert with_.peak_block_bytes > without.peak_block_bytes


def test_validate_knows_statistics_that_are_still_to_be_made(pair, tmp_path):
    models = pair("olmoe")
    text = str(tmp_path / "text.jsonl")
    settings = config("regmean", models, data={"math": text, "code": text})
    del settings["statistics"]
    with pytest.raises(DataError, match="no such file"):
        moemerge.validate(settings)
    (tmp_path / "text.jsonl").write_text('{"text": "some"}\n')
    report = moemerge.validate(settings)
    assert report.statistics["math"]["gram"]["computed_from"] == [text]


def test_models_with_adapters_have_statistics_of_their_own(zoo_folder, tmp_path):
    base = zoo_folder("olmoe")
    modules = [f"model.layers.{n}.self_attn.q_proj" for n in range(3)]
    lora = zoo.lora(tmp_path / "lora", base, *modules)
    adapted = f"{base}+{lora}"
    models = {
        "math": (adapted, gather(adapted, tmp_path / "math.stats", seed=1)),
        "code": (base, gather(base, tmp_path / "code.stats", seed=2)),
    }
    moemerge.merge(config("regmean", models), tmp_path / "out")
    merged = unit_tensors(tmp_path / "out")
    key = "model.layers.1.self_attn.q_proj.weight"
    weights = [unit_tensors(model) for model, _ in models.values()]
    expected = direct(key, weights, [stats for _, stats in models.values()])
    torch.testing.assert_close(merged[key], expected, rtol=1e-4, atol=1e-4)
    swapped = config("regmean", models)
    swapped["statistics"]["math"] = swapped["statistics"]["code"]
    with pytest.raises(CheckpointError, match="same shapes but other weights"):
        moemerge.validate(swapped)


# --- refusals ---------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["regmean", "lot", "slta", "cat", "fisher"])
def test_neither_statistics_nor_data(pair, zoo_folder, method):
    settings = config(method, pair("olmoe"), base_model=str(zoo_folder("olmoe")))
    del settings["statistics"]
    what = "each model's squared gradients" if method == "fisher" else "the second moments"
    with pytest.raises(ConfigError, match=rf"'{method}' needs {what}.* math, code"):
        moemerge.validate(settings)


def test_the_wrong_kind_is_refused(pair, tmp_path):
    models = pair("olmoe")
    with pytest.raises(CheckpointError, match="cannot be used") as refused:
        moemerge.merge(config("fisher", models), tmp_path / "out")
    for name in TOKENS:
        assert f"the statistics of '{name}'" in str(refused.value)
    assert "are of kind gram, but the merge needs fisher" in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_statistics_of_another_model_are_refused(pair):
    settings = config("regmean", dict(pair("olmoe")))
    files = settings["statistics"]
    with pytest.raises(CheckpointError, match="same shapes but other weights"):
        moemerge.validate({**settings, "statistics": {**files, "math": files["code"]}})


def test_damaged_files_are_refused(pair, tmp_path):
    settings = config("regmean", pair("olmoe"))
    whole = Path(settings["statistics"]["math"]).read_bytes()
    (tmp_path / "math.stats").write_bytes(whole[:-1000])
    for file in (tmp_path / "math.stats", tmp_path / "no.stats", tmp_path):
        wrong = {**settings["statistics"], "math": str(file)}
        with pytest.raises(CheckpointError):
            moemerge.validate({**settings, "statistics": wrong})
    twice = {**settings["statistics"], "math": [settings["statistics"]["math"]] * 2}
    with pytest.raises(CheckpointError, match="two files of gram statistics"):
        moemerge.validate({**settings, "statistics": twice})


def test_statistics_that_are_not_finite_are_named(pair, tmp_path):
    models = pair("olmoe")
    file = tmp_path / "math.stats"
    shutil.copy(models["math"][1].file, file)
    size = int.from_bytes(file.read_bytes()[:8], "little")
    header = json.loads(file.read_bytes()[8 : 8 + size])
    key = "model.layers.0.self_attn.o_proj.weight"
    start, _ = header[key]["data_offsets"]
    with open(file, "r+b") as opened:
        opened.seek(8 + size + start)
        opened.write(torch.full((1,), float("nan")).numpy().tobytes())
    settings = config("regmean", models)
    settings["statistics"]["math"] = str(file)
    with pytest.raises(NumericalError, match=rf"statistics of 'math' hold non-finite .* {key}"):
        moemerge.merge(settings, tmp_path / "out")
    assert not (tmp_path / "out").exists()
