"""Neurons by groups: found from text, and applied by a merge in every layout."""

import json
import shutil

import pytest
import torch
import transformers
import yaml
from safetensors.torch import save_file

import moemerge
import zoo
from coefficients.cases import CPU, NAMES, config, make_models, texts
from collecting import direct
from collecting.cases import token_rows
from merging.gathered import open_model, unit_tensors
from moemerge.config.coefficients import read_coefficients
from moemerge.errors import ConfigError, UsageError
from moemerge.families.layout import projection_of
from moemerge.statistics.coefficients.maths import served_domain


@pytest.fixture(scope="module")
def folder(zoo_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("neurons")
    return make_models(path, zoo_folder("olmoe"), (9, 17, 5), unlike=True)


def activity(folder, name):
    """act² of every neuron of the base, a mean over all tokens: by the expert's place."""
    rows = token_rows(folder / "base", folder / f"{name}.jsonl")
    tokens = sum(map(len, rows))
    heard = direct.inputs(folder / "base", rows)  # of down projections: what each neuron says
    downs = {key: x for key, x in heard.items() if key.endswith("down_proj.weight")}
    return {k.rsplit(".", 2)[0]: x.square().sum(0) / tokens for k, x in downs.items()}


def test_neurons_are_sorted_as_plain_transformers_does(folder, tmp_path):
    out = tmp_path / "neuron.yml"
    settings = {"specific": 1.5, "own": 0.8, "other": 0.1}
    report = moemerge.find_coefficients(
        "neuron", config(folder), out, data=texts(folder), **settings, **CPU
    )
    found = read_coefficients(out)
    heard = {name: activity(folder, name) for name in NAMES}
    counts = {"math": 0, "code": 0, "general": 0}
    assert found.neurons.labels.keys() == heard["math"].keys()
    for place, own in heard["math"].items():
        expected = ""
        for a, b in zip(own.tolist(), heard["code"][place].tolist(), strict=True):
            first, second = a >= 1.5 * b and a > 0, b >= 1.5 * a and b > 0
            expected += "0" if first else "1" if second else "2"
        assert found.neurons.labels[place] == expected
        for letter, group in zip("012", counts, strict=True):
            counts[group] += expected.count(letter)
    assert report.measured["neurons"] == counts
    assert min(counts.values()) > 0
    assert found.neurons.groups["code"] == {"math": 0.1, "code": 0.8}
    assert found.neurons.groups["general"] == pytest.approx({"math": 0.45, "code": 0.45})
    assert found.values == {name: {"*": pytest.approx(0.45)} for name in NAMES}


GROUPS = {"first": {"math": 1.0, "code": -0.5}, "rest": {"math": 0.0, "code": 2.0}}
STAR = {"math": 0.5, "code": 0.25}


def written(path, labels, **more):
    neurons = {"groups": GROUPS, "labels": labels, **more}
    data = {"coefficients": {n: {"*": c} for n, c in STAR.items()}, "neurons": neurons}
    path.write_text(yaml.safe_dump(data))
    return path


def units(folder):
    return open_model(folder)[1].units_by_key


def mlps(folder):
    """Neurons of every MLP, by place."""
    downs = {k: u for k, u in units(folder).items() if projection_of(u) == "down"}
    return {k.rsplit(".", 2)[0]: u.shape[1] for k, u in downs.items() if len(u.shape) == 2}


def shares(unit, name, labels):
    """What a unit's change counts for, by hand."""
    place, projection = unit.key.rsplit(".", 2)[0], projection_of(unit)
    if place not in labels or projection is None or (projection == "down" and len(unit.shape) < 2):
        return torch.tensor(STAR[name], dtype=torch.float64)
    first, rest = (group[name] for group in GROUPS.values())
    vector = torch.tensor([first if x == "0" else rest for x in labels[place]]).double()
    return vector if projection == "down" or len(unit.shape) < 2 else vector[:, None]


# Experts one by one; as stacks of gate and up together; interleaved with biases; dense layers and
# shared experts beside them.
LAYOUTS = [("olmoe", False), ("olmoe", True), ("mixtral", False), ("gpt_oss", True)]
LAYOUTS += [("deepseek_v3", False)]


@pytest.mark.parametrize(("family", "fused"), LAYOUTS)
def test_a_merge_scales_changes_neuron_by_neuron(tmp_path, family, fused):
    base = zoo.build(family, tmp_path / "base", fused=fused)
    for seed, name in enumerate(NAMES, 1):
        zoo.perturb(base, tmp_path / name, seed, scale=0.3)
    places = mlps(base)
    skipped = sorted(places)[0]  # which falls back to `*`
    labels = {
        place: "".join("01"[(j + len(place)) % 3 == 0] for j in range(width))
        for place, width in places.items()
        if place != skipped
    }
    file = written(tmp_path / "mine.yml", labels)
    moemerge.merge(config(tmp_path, coefficients=str(file)), tmp_path / "out", device="cpu")
    before, math, code = (unit_tensors(tmp_path / n) for n in ("base", *NAMES))
    merged, found = unit_tensors(tmp_path / "out"), 0
    for key, unit in units(base).items():
        change = sum(
            shares(unit, name, labels) * (own[key] - before[key])
            for name, own in zip(NAMES, (math, code), strict=True)
        )
        wanted = before[key] + change
        torch.testing.assert_close(merged[key], wanted, rtol=1e-4, atol=1e-5, msg=key)
        found += shares(unit, "math", labels).dim() > 0
    assert found >= 3 * len(labels) or (family == "gpt_oss" and found >= 2 * len(labels))


@pytest.mark.parametrize("method", ["ties", "iso_c"])
def test_any_method_gets_models_with_so_much_of_their_change(folder, tmp_path, method):
    labels = {place: "01" * (width // 2) for place, width in mlps(folder / "base").items()}
    file = written(tmp_path / "mine.yml", labels)
    plain = {"weight": 1.0, "density": 0.5} if method == "ties" else {}
    given = config(folder, merge_method=method, parameters=plain, coefficients=str(file))
    moemerge.merge(given, tmp_path / "out", device="cpu")
    before, layout = zoo.tensors(folder / "base"), units(folder / "base")
    for name in NAMES:
        shutil.copytree(folder / name, tmp_path / name)
        own = zoo.tensors(folder / name)
        scaled = {}
        for key, tensor in own.items():
            alone = projection_of(layout[key]) is None  # what no label speaks of: `*` of the file
            share = 1.0 if alone else shares(layout[key], name, labels).float()
            scaled[key] = torch.lerp(before[key], tensor, share)
        save_file(scaled, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    star = {"coefficients": {n: {"*": STAR[n], **dict.fromkeys(labels, 1.0)} for n in NAMES}}
    (tmp_path / "star.yml").write_text(yaml.safe_dump(star))
    twin = {**given, "coefficients": str(tmp_path / "star.yml")}
    twin["models"] = [{"model": str(tmp_path / n), "name": n} for n in NAMES]
    moemerge.merge(twin, tmp_path / "twin", device="cpu")
    wanted = zoo.tensors(tmp_path / "twin")
    for key, value in zoo.tensors(tmp_path / "out").items():
        torch.testing.assert_close(value, wanted[key], rtol=1e-4, atol=1e-5, msg=key)


def test_which_domain_a_neuron_serves():
    # never active; in one alone; as active in both; twice as active; nearly twice
    activity = torch.tensor([[0.0, 1.0, 1.0, 1.0, 1.9], [0.0, 0.0, 1.0, 2.0, 1.0]]).double()
    assert served_domain(activity, 2.0).tolist() == [2, 0, 2, 1, 2]
    assert served_domain(activity, 1.0).tolist() == [2, 0, 2, 1, 0]
    assert served_domain(activity[:1], 2.0).tolist() == [1] * 5
    third = torch.cat([activity, torch.zeros(1, 5, dtype=torch.float64)])
    assert served_domain(third, 2.0).tolist() == [3, 0, 0, 1, 0]  # of two alike the first


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": {"model.layers.0.mlp.experts.1": "012"}}, "'2' names no group"),
        ({"labels": {"model.layers.0.mlp.experts.1": "01"}}, "2 letters, but"),
        ({"labels": {"model.layers.0.mlp.experts.99": "01"}}, "fits no MLP"),
        ({"groups": {"a": {"math": 1.0}, "b": {"math": 1.0, "code": 0.0}}}, "differs in 'code'"),
        ({"groups": {}}, "groups"),
        ({"grups": {}}, "grups"),
        ({"merge_method": "linear"}, "keeps no base apart"),
    ],
)
def test_what_is_refused(folder, tmp_path, change, words):
    """Of a file, and of the method that it is for."""
    width = mlps(folder / "base")["model.layers.0.mlp.experts.1"]
    parts = {"labels": {"model.layers.0.mlp.experts.1": "01" * (width // 2)}, **change}
    method = parts.pop("merge_method", "task_arithmetic")
    file = written(tmp_path / "mine.yml", **parts)
    given = config(folder, merge_method=method, coefficients=str(file))
    with pytest.raises(ConfigError, match=words):
        moemerge.merge(given, tmp_path / "out", device="cpu")
    assert not (tmp_path / "out").exists()


def test_experts_that_no_token_reaches_are_general(folder, tmp_path):
    rows = {name: tmp_path / f"{name}.jsonl" for name in NAMES}
    for file in rows.values():
        file.write_text(json.dumps({"text": "why"}))  # one short text, the same for both
    out = tmp_path / "neuron.yml"
    moemerge.find_coefficients("neuron", config(folder), out, data=rows, **CPU)
    labels = read_coefficients(out).neurons.labels
    assert set("".join(labels.values())) == {"2"}
    assert labels.keys() == mlps(folder / "base").keys()


def test_an_mlp_that_stores_gate_and_up_as_one_has_no_neurons(folder, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    built = transformers.Phi3Config(vocab_size=zoo.VOCAB, **sizes, **heads)
    transformers.Phi3ForCausalLM(built).save_pretrained(tmp_path / "base")
    zoo.tiny_tokenizer(tmp_path / "base")
    for seed, name in enumerate(NAMES, 1):
        zoo.perturb(tmp_path / "base", tmp_path / name, seed, scale=0.3)
    with pytest.raises(UsageError, match=r"no MLP of .* has neurons"):
        moemerge.find_coefficients(
            "neuron", config(tmp_path), tmp_path / "a.yml", data=texts(folder), **CPU
        )
    file = written(tmp_path / "mine.yml", {"model.layers.1.mlp": "01" * 24})
    with pytest.raises(ConfigError, match=r"gate_up_proj\.weight is neither gate, up nor down"):
        moemerge.validate(config(tmp_path, coefficients=str(file)))
