"""Models kept beside a merge and taken out again: every unit against float64."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import moemerge
import zoo
from merging.gathered import unit_tensors
from moemerge.errors import CheckpointError, ConfigError, UsageError
from moemerge.merging.kept import pack_bits, unpack_bits

NAMES = ("math", "code", "chat")


@pytest.fixture(scope="module", params=[False, True], ids=["separate", "fused"])
def folder(request, zoo_folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks")
    built = zoo_folder("olmoe", fused=request.param)
    base = zoo.perturb(built, path / "base", 7, scale=0.0)
    for seed, name in enumerate(NAMES, 1):
        zoo.perturb(base, path / name, seed, scale=0.1 * seed)
    return path


def config(folder, method, tasks, **more):
    weights = {"parameters": {"weight": 1.0}} if method == "task_arithmetic" else {}
    return {
        "merge_method": method,
        "base_model": str(folder / "base"),
        "models": [{"model": str(folder / n), "name": n, **weights} for n in NAMES],
        "tasks": tasks,
        **more,
    }


def units(folder):
    return {name: unit_tensors(folder / name) for name in ("base", *NAMES)}


def taken_out(folder, tmp_path, name):
    report = moemerge.extract(tmp_path / "shared", name, tmp_path / name)
    assert report.units == len(unit_tensors(folder / "base"))
    return unit_tensors(tmp_path / name), report


def test_tall_masks_are_the_direct_computation(folder, tmp_path):
    settings = config(folder, "task_arithmetic", {"keep": "tall", "threshold": 0.5})
    report = moemerge.merge(settings, tmp_path / "shared", device="cpu").to_json()
    own, shared = units(folder), unit_tensors(tmp_path / "shared")
    assert report["tasks"]["tasks"]["code"]["bytes"] == sum(
        -(-t.numel() // 8) for t in shared.values()
    )
    for name in NAMES:
        got, _ = taken_out(folder, tmp_path, name)
        for key, value in got.items():
            base = own["base"][key]
            total = sum(own[n][key] - base for n in NAMES)
            change = own[name][key] - base
            edge = change.abs() - 0.5 * (total - change).abs()
            expected = torch.where(edge > 0, base + total, base)
            clear = edge.abs() > 1e-5 * total.abs().max()  # float32's rounding decides elsewhere
            assert clear.double().mean() > 0.9
            torch.testing.assert_close(value[clear], expected[clear], rtol=1e-5, atol=1e-5)
            assert bool(((value == shared[key]) | (value == base)).all())


def test_emr_is_the_direct_computation(folder, tmp_path):
    report = moemerge.merge(
        config(folder, "emr", {"keep": "emr"}), tmp_path / "shared", device="cpu"
    )
    own, shared = units(folder), unit_tensors(tmp_path / "shared")
    united, sums = {}, {name: [0.0, 0.0] for name in NAMES}
    for key, base in own["base"].items():
        changes = {n: own[n][key] - base for n in NAMES}
        sign = sum(changes.values()).sign()
        agreeing = [torch.where(c.sign() == sign, c.abs(), 0.0) for c in changes.values()]
        united[key] = sign * torch.stack(agreeing).max(0).values
        torch.testing.assert_close(shared[key], base + united[key], rtol=1e-5, atol=1e-5)
        for name, change in changes.items():
            sums[name][0] += float(change.abs().sum())
            sums[name][1] += float(united[key][change * united[key] > 0].abs().sum())
    for name in NAMES:
        got, extracted = taken_out(folder, tmp_path, name)
        scale = sums[name][0] / sums[name][1]
        assert extracted.scale == pytest.approx(scale, rel=1e-4)
        assert report.tasks["tasks"][name]["scale"] == extracted.scale
        for key, value in got.items():
            base, tau = own["base"][key], united[key]
            product = (own[name][key] - base) * tau
            expected = base + scale * tau * (product > 0)
            clear = (product.abs() > 1e-9) | (product == 0)
            torch.testing.assert_close(value[clear], expected[clear], rtol=1e-4, atol=2e-5)


def test_twin_keeps_the_leading_directions_of_the_rest(folder, tmp_path):
    settings = config(folder, "task_arithmetic", {"keep": "twin", "rank": 4}, dtype="float32")
    for model in settings["models"]:
        model["parameters"] = {"weight": 0.3}
    moemerge.merge(settings, tmp_path / "shared", device="cpu")
    own, shared = units(folder), unit_tensors(tmp_path / "shared")
    low, whole = 0, 0
    for name in NAMES[:2]:
        got, _ = taken_out(folder, tmp_path, name)
        for key, value in got.items():
            rest = own[name][key] - shared[key]
            if rest.dim() == 2 and 4 * sum(rest.shape) < rest.numel():
                u, s, vh = torch.linalg.svd(rest, full_matrices=False)
                rest = (u[:, :4] * s[:4]) @ vh[:4]
                low += 1
            else:
                whole += 1
            torch.testing.assert_close(value, shared[key] + rest, rtol=1e-4, atol=1e-5, msg=key)
    assert low > 50
    assert whole > 5


def test_a_task_is_a_model_that_loads_and_the_shared_one_may_be_replaced(folder, tmp_path):
    settings = config(folder, "task_arithmetic", {"keep": "tall"})
    moemerge.merge(settings, tmp_path / "shared", device="cpu")
    moemerge.merge(settings, tmp_path / "shared", device="cpu", overwrite=True)
    kept = tmp_path / "shared" / "moemerge_tasks"
    assert sorted(p.name for p in kept.iterdir()) == ["0", "1", "2", "tasks.json"]
    moemerge.extract(tmp_path / "shared", "math", tmp_path / "math")
    assert not (tmp_path / "math" / "moemerge_tasks").exists()
    assert moemerge.inspect(tmp_path / "math").family == "OLMoE"
    assert json.loads((tmp_path / "math" / "moemerge_report.json").read_text())["extract"]
    moved = shutil.copytree(folder / "base", tmp_path / "moved")
    elsewhere = {**settings, "base_model": str(moved)}
    moemerge.merge(elsewhere, tmp_path / "shared", device="cpu", overwrite=True)
    shutil.rmtree(moved)
    with pytest.raises(CheckpointError, match="moved"):
        moemerge.extract(tmp_path / "shared", "math", tmp_path / "again")
    moemerge.extract(tmp_path / "shared", "math", tmp_path / "again", base=folder / "base")
    zoo.assert_same(tmp_path / "math", tmp_path / "again")


def test_what_is_refused(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"tasks\.json is missing"):
        moemerge.extract(folder / "math", "math", tmp_path / "x")
    moemerge.merge(config(folder, "emr", {"keep": "emr"}), tmp_path / "shared", device="cpu")
    with pytest.raises(UsageError, match="did you mean 'math'"):
        moemerge.extract(tmp_path / "shared", "mth", tmp_path / "x")
    mask = tmp_path / "shared" / "moemerge_tasks" / "0" / "model.safetensors"
    whole = mask.read_bytes()
    parts = load_file(mask)
    first = next(iter(parts))
    save_file({**parts, first: parts[first].unsqueeze(0)}, mask)
    with pytest.raises(CheckpointError, match="not what this merge wrote"):
        moemerge.extract(tmp_path / "shared", "math", tmp_path / "x")
    mask.write_bytes(whole[:-5])
    with pytest.raises(CheckpointError):
        moemerge.extract(tmp_path / "shared", "math", tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_another_base_and_parts_of_another_model_are_refused(folder, tmp_path):
    shared = tmp_path / "shared"
    settings = config(folder, "task_arithmetic", {"keep": "tall"})
    moemerge.merge(settings, shared, device="cpu")
    with pytest.raises(CheckpointError, match="not the base of this merge"):
        moemerge.extract(shared, "math", tmp_path / "x", base=folder / "code")
    weights = shared / "model.safetensors"
    whole = weights.read_bytes()
    shutil.copy(folder / "code" / "model.safetensors", weights)
    with pytest.raises(CheckpointError, match="was changed after the merge"):
        moemerge.extract(shared, "math", tmp_path / "x")
    weights.write_bytes(whole)
    kept = shared / "moemerge_tasks"
    shutil.copy(kept / "1" / "model.safetensors", kept / "0" / "model.safetensors")
    with pytest.raises(CheckpointError, match="not what this merge wrote"):
        moemerge.extract(shared, "math", tmp_path / "x")
    other = {**settings, "parameters": {"lambda": 0.5}}
    moemerge.merge(other, tmp_path / "other", device="cpu")
    shutil.rmtree(kept)
    shutil.copytree(tmp_path / "other" / "moemerge_tasks", kept)
    with pytest.raises(CheckpointError, match="not what this merge wrote"):
        moemerge.extract(shared, "math", tmp_path / "x")
    assert not (tmp_path / "x").exists()


SLICES = [{"sources": [{"model": name, "layer_range": [0, 2]} for name in (*NAMES, "base")]}]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tasks": {"keep": "tal"}}, "did you mean 'tall'"),
        ({"tasks": {"keep": "emr", "threshold": 0.3}}, "is for `keep: tall` alone"),
        ({"tasks": {"keep": "tall", "rank": 3}}, "is for `keep: twin` alone"),
        ({"merge_method": "linear"}, "masks need it apart"),
        ({"tokenizer_source": "union"}, "cannot be changed where models are kept"),
        ({"router": {"keep": "math"}}, "leaves no mask of the routers"),
        ({"calibration": {}, "data": dict.fromkeys(NAMES, "a.jsonl")}, "changes the merge"),
        ({"refit": {}, "data": dict.fromkeys(NAMES, "a.jsonl")}, "changes the merge"),
        ({"models": None, "slices": SLICES}, "is for models merged whole, not for slices"),
    ],
    ids=str,
)
def test_configs_that_are_refused(tmp_path, changes, words):
    with pytest.raises(ConfigError) as caught:
        moemerge.load_config({**config(tmp_path, "emr", {"keep": "emr"}), **changes})
    assert words in str(caught.value)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (8,), (3, 5), (0,), (2, 3, 4)])
def test_bits_come_back(shape):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.5
    assert torch.equal(unpack_bits(pack_bits(mask), shape), mask)
