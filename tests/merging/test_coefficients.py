"""Coefficients of a file: what they multiply, and what is refused."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

import moemerge
import zoo
from merging.gathered import unit_tensors
from moemerge.config.coefficients import dump_coefficients, read_coefficients
from moemerge.errors import ConfigError

FILE = """
coefficients:
  math:
    "*": 0.5
    model.layers.1: 0.25
    model.layers.1.mlp.experts.3: 0.0
    model.layers.1.mlp.experts.3.up_proj.weight: 2
  code: {"*": 1.0}
"""


@pytest.fixture(scope="module")
def folder(zoo_folder, tmp_path_factory):
    return fine_tunes(zoo_folder("olmoe"), tmp_path_factory.mktemp("coefficients"))


def fine_tunes(model, path):
    base = zoo.perturb(model, path / "base", 7, scale=0.0)
    for seed, name in enumerate(("math", "code"), 1):
        zoo.perturb(base, path / name, seed, scale=0.3)
    return path


def config(folder, file, method="task_arithmetic", **more):
    return {
        "merge_method": method,
        "base_model": str(folder / "base"),
        "models": [{"model": str(folder / name), "name": name} for name in ("math", "code")],
        "coefficients": str(file),
        **more,
    }


def written(tmp_path, text=FILE, name="c.yml"):
    file = tmp_path / name
    file.write_text(text)
    return file


def share(key):
    """What FILE says of math for a unit, found by hand."""
    if key.startswith("model.layers.1."):
        if key == "model.layers.1.mlp.experts.3.up_proj.weight":
            return 2.0
        return 0.0 if key.startswith("model.layers.1.mlp.experts.3.") else 0.25
    return 0.5


def test_a_place_ends_at_a_dot(tmp_path):
    coefficients = read_coefficients(written(tmp_path))
    assert coefficients.place("math", "model.layers.10.mlp.gate.weight") == "*"


def test_yaml_and_json_hold_the_same(tmp_path):
    first = read_coefficients(written(tmp_path))
    data = dump_coefficients(first.values, {"method": "mine", "n": 3})
    (tmp_path / "d.yml").write_bytes(data)
    second = read_coefficients(tmp_path / "d.yml")
    third = read_coefficients(
        written(tmp_path, json.dumps({"coefficients": first.values}), "e.json")
    )
    assert first.values == second.values == third.values
    assert second.made_by == {"method": "mine", "n": 3}


@pytest.mark.parametrize(("weight", "fused"), [(None, False), (0.5, False), (None, True)])
def test_coefficients_multiply_weights(zoo_folder, folder, tmp_path, weight, fused):
    if fused:
        folder = fine_tunes(zoo_folder("olmoe", fused=True), tmp_path)
    parameters = {} if weight is None else {"parameters": {"weight": weight}}
    settings = config(folder, written(tmp_path), **parameters)
    report = moemerge.merge(settings, tmp_path / "out", device="cpu").to_json()
    assert report["coefficients"]["file"] == str(tmp_path / "c.yml")
    base, math, code = (unit_tensors(folder / n) for n in ("base", "math", "code"))
    w = 1.0 if weight is None else weight
    for key, value in unit_tensors(tmp_path / "out").items():
        change = share(key) * (math[key] - base[key]) + (code[key] - base[key])
        torch.testing.assert_close(value, base[key] + w * change, rtol=1e-5, atol=1e-5, msg=key)
    again = (tmp_path / "out" / "moemerge_config.yml").read_text()
    assert str(tmp_path / "c.yml") in again  # absolute, as given


@pytest.mark.parametrize("method", ["tsv", "ram", "pcb"])
def test_methods_without_weights_get_models_with_so_much_of_their_change(folder, tmp_path, method):
    scaled, base = tmp_path / "scaled", zoo.tensors(folder / "base")
    for name in ("math", "code"):
        shutil.copytree(folder / name, scaled / name)
        own = zoo.tensors(folder / name)
        shares = {key: share(key) if name == "math" else 1.0 for key in own}
        changed = {key: torch.lerp(base[key], t, shares[key]) for key, t in own.items()}
        save_file(changed, scaled / name / "model.safetensors", metadata={"format": "pt"})
    moemerge.merge(config(folder, written(tmp_path), method), tmp_path / "out", device="cpu")
    plain = config(folder, written(tmp_path), method)
    plain["models"] = [{"model": str(scaled / n), "name": n} for n in ("math", "code")]
    del plain["coefficients"]
    moemerge.merge(plain, tmp_path / "plain", device="cpu")
    wanted = unit_tensors(tmp_path / "plain")
    for key, value in unit_tensors(tmp_path / "out").items():
        torch.testing.assert_close(value, wanted[key], rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("coefficients: {math: {'*': 1}}", ["no coefficients for code"]),
        (FILE.replace("code:", "cod:"), ["line 8", "did you mean 'code'"]),
        (FILE.replace("0.25", "much"), ["line 5", "model.layers.1", "must be a number"]),
        (FILE.replace("0.25", ".nan"), ["line 5", "finite number"]),
        (FILE.replace("0.25", "true"), ["line 5"]),
        (FILE + "  code: {'*': 2.0}\n", ["line 9", "code"]),
        (FILE + "coefficient: {}\n", ["line 9", "did you mean 'coefficients'"]),
        ("[1, 2]", ["expected"]),
        ("coefficients: {}", ["must not be empty"]),
        ("{", ["line 1"]),
    ],
    ids=str,
)
def test_faults_of_the_file_are_told_with_their_lines(folder, tmp_path, text, words):
    with pytest.raises(ConfigError) as caught:
        moemerge.load_config(config(folder, written(tmp_path, text)))
    for word in ["c.yml", *words]:
        assert word in str(caught.value)


def test_places_that_fit_nothing_and_units_without_a_place_are_refused(folder, tmp_path):
    text = FILE.replace("model.layers.1:", "model.layer.1:")
    with pytest.raises(ConfigError, match=r"line 5: .*model\.layer\.1: fits no tensor"):
        moemerge.validate(config(folder, written(tmp_path, text)))
    text = FILE.replace('"*": 0.5', "model.layers.0: 0.5")
    with pytest.raises(ConfigError, match=r"no coefficient of 'math' fits model\.") as caught:
        moemerge.validate(config(folder, written(tmp_path, text)))
    assert '"*": 1.0' in str(caught.value)


def test_weights_that_a_method_cannot_have_are_refused_with_their_line(folder, tmp_path):
    text = FILE.replace("0.25", "-0.25")
    settings = config(folder, written(tmp_path, text), "lot")
    settings["statistics"] = {"math": "a", "code": "b"}
    with pytest.raises(ConfigError, match=r"line 5: .*weight must lie in \[0, inf\)"):
        moemerge.validate(settings)


def test_methods_without_weights_and_base_are_refused(folder, tmp_path):
    settings = config(folder, written(tmp_path), "lore")
    with pytest.raises(ConfigError, match="coefficients: 'lore' takes no weights"):
        moemerge.load_config(settings)


def test_a_file_that_is_missing(folder, tmp_path):
    with pytest.raises(ConfigError, match="is missing"):
        moemerge.load_config(config(folder, tmp_path / "none.yml"))


def test_methods_that_normalise_weights_normalise_coefficients(folder, tmp_path):
    settings = config(folder, written(tmp_path), "linear")
    del settings["base_model"]
    moemerge.merge(settings, tmp_path / "out", device="cpu")
    math, code = (unit_tensors(folder / n) for n in ("math", "code"))
    for key, value in unit_tensors(tmp_path / "out").items():
        mean = (share(key) * math[key] + code[key]) / (share(key) + 1)
        torch.testing.assert_close(value, mean, rtol=1e-5, atol=1e-5, msg=key)


def test_places_of_a_slice_are_those_of_the_models_own_layers(folder, tmp_path):
    sources = [
        {"model": str(folder / "math"), "name": "math", "layer_range": [1, 2]},
        {"model": str(folder / "code"), "name": "code", "layer_range": [0, 1]},
        {"model": str(folder / "base"), "layer_range": [0, 1]},
    ]
    settings = config(folder, written(tmp_path))
    del settings["models"]
    moemerge.merge({**settings, "slices": [{"sources": sources}]}, tmp_path / "out", device="cpu")
    merged = unit_tensors(tmp_path / "out")
    base, math, code = (unit_tensors(folder / n) for n in ("base", "math", "code"))
    for tail in ("self_attn.q_proj", "mlp.experts.3.gate_proj", "mlp.experts.3.up_proj"):
        first, second = (f"model.layers.{n}.{tail}.weight" for n in (0, 1))
        change = share(second) * (math[second] - base[first]) + (code[first] - base[first])
        torch.testing.assert_close(merged[first], base[first] + change, rtol=1e-5, atol=1e-5)
