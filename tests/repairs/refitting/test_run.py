"""A whole refit: what is written and said, refused, resumed and left alone."""

import json
from dataclasses import replace

import pytest
import torch

import moemerge
import zoo
from moemerge.checkpoint import Checkpoint
from moemerge.config.faults import parse_settings
from moemerge.config.repair_settings import DistillSettings, RefitSettings
from moemerge.errors import (
    ArchitectureError,
    ConfigError,
    DataError,
    NumericalError,
    ResourceError,
    UsageError,
)
from moemerge.forward import settings as streaming
from repairs.calibration import cases as calibrating
from repairs.refitting.cases import Killed, kill_after, make_case
from repairs.refitting.test_maths import SMALL, assert_sums_of_bfloat16_values

FAST = {"ridge": 0.01, "holdout": 0.2, "router": "keep", "measure": False}


@pytest.fixture(scope="module")
def refitted(case, tmp_path_factory):
    out = tmp_path_factory.mktemp("refitted") / "out"
    return out, case.refit(out)


# --- what is written ----------------------------------------------------------------------------


def test_every_map_moves_and_nothing_else_does(case, refitted):
    out, report = refitted
    changed = calibrating.changed_tensors(case.merged, out)
    assert changed
    assert all(
        any(part in name for part in ("_proj.", "mlp.gate.weight", "lm_head")) for name in changed
    )
    assert calibrating.leftovers(out) == []
    assert report.totals["maps"] == 2 * (4 + 2 * zoo.EXPERTS) + 1
    assert report.totals["routers"] == 2


def test_the_report_tells_of_every_map(refitted):
    out, report = refitted
    document = json.loads((out / "moemerge_report.json").read_text())
    layers = document["refit"]["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1, None]
    for layer in layers[:2]:
        for key in ("drift_before", "drift_after"):
            assert set(layer[key]) == {"math", "code"}
        for domain, drift in layer["drift_after"].items():
            assert 0 < drift < layer["drift_before"][domain]
    maps = {row.get("map", row.get("router")): row for row in layers[0]["maps"]}
    q = maps["model.layers.0.self_attn.q_proj.weight"]
    assert q["target"] == "output"
    assert q["tokens"] + q["held_out"]["tokens"] == sum(report.tokens.values()) + sum(
        report.held_out_tokens.values()
    )
    assert q["held_out"]["error_after"] < q["held_out"]["error_before"]
    assert maps["model.layers.0.self_attn.o_proj.weight"]["target"] == "hidden state"
    down = maps["model.layers.0.mlp.experts.down_proj"]
    assert down["target"] == "hidden state"
    assert sum(down["experts"]["tokens"]) == zoo.TOP_K * q["tokens"]
    assert "held-out" not in report.notices
    layer = document["refit"]["layers"][0]
    up = next(row for row in layer["maps"] if "experts" in row)["experts"]
    for side, where in ((up, "calibration"), (up["held_out"], "held_out")):
        before, after = (
            sum(v for v in side[f"error_{end}"] if v is not None) for end in ("before", "after")
        )
        assert layer["error_left"][where]["experts.gate_up_proj"] == pytest.approx(after / before)
    kinds = document["refit"]["totals"]["error_left"]["held_out"]
    card = (out / "README.md").read_text()
    assert all(f"| {kinds[kind]:.1%} |" in card for kind in ("q_proj", "router", "lm_head"))
    assert "linear maps refitted to the sources" in card
    assert "drift refitted" in card


def test_the_resolved_config_makes_it_again(refitted, tmp_path):
    out, _ = refitted
    moemerge.run(out / "moemerge_config.yml", tmp_path / "again")
    assert calibrating.changed_tensors(tmp_path / "again", out) == set()


def test_without_a_base_it_says_what_that_may_cost(case, tmp_path):
    told = "no source is the base model"
    report = case.refit(tmp_path / "out", **FAST)
    assert any(told in notice for notice in report.notices)
    sources = {**case.sources, "base": case.merged}
    data = {**case.data, "base": case.data["math"]}
    report = case.refit(tmp_path / "kept", sources=sources, data=data, **FAST)
    assert not any(told in notice for notice in report.notices)


def test_a_page_of_before_and_after(case, tmp_path):
    pytest.importorskip("plotly")
    page, out = tmp_path / "page.html", tmp_path / "out"
    case.refit(out, report=page, **FAST)
    text = page.read_text()
    assert "What the refit repaired" in text
    assert str(out) in text
    assert str(case.merged) in text


# --- parts and layers ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ("attention", ("self_attn",)),
        ("experts,head", ("experts", "lm_head")),
        ("router", ("mlp.gate.weight",)),
    ],
)
def test_parts_alone(case, parts, words, tmp_path):
    case.refit(tmp_path / "out", ridge=0.01, parts=parts)
    changed = calibrating.changed_tensors(case.merged, tmp_path / "out")
    assert changed
    assert all(any(word in name for word in words) for name in changed)


def test_some_layers_alone(case, tmp_path):
    report = case.refit(tmp_path / "out", layers="1", **FAST)
    changed = calibrating.changed_tensors(case.merged, tmp_path / "out")
    assert changed
    assert all("layers.1." in name for name in changed)
    assert any("the head keeps its merged weights" in notice for notice in report.notices)


def test_routers_by_harc_are_those_of_a_calibration(case, tmp_path):
    """Where nothing else moves, the two jobs solve the same systems."""
    case.refit(tmp_path / "refit", parts="router", router="harc", ridge=1.0, holdout=0.0)
    moemerge.calibrate(
        case.merged, tmp_path / "harc", sources=case.sources, data=case.data, device="cpu"
    )
    mine, theirs = zoo.tensors(tmp_path / "refit"), zoo.tensors(tmp_path / "harc")
    for name, router in theirs.items():
        torch.testing.assert_close(mine[name], router, rtol=1e-4, atol=1e-6)


def test_exact_routers_are_those_of_a_calibration(case, tmp_path):
    weights = {"code": 3.0}
    case.refit(tmp_path / "refit", parts="router", ridge=1.0, holdout=0.0, weights=weights)
    moemerge.calibrate(
        case.merged,
        tmp_path / "exact",
        sources=case.sources,
        data=case.data,
        weights=weights,
        targets="source-features",
        objective="exact",
        device="cpu",
    )
    mine, theirs = zoo.tensors(tmp_path / "refit"), zoo.tensors(tmp_path / "exact")
    before = zoo.tensors(case.merged)
    for name, router in theirs.items():
        move = (router - before[name]).norm()
        assert (mine[name] - router).norm() <= 1e-3 * move + 1e-9


# --- killed and resumed -------------------------------------------------------------------------


@pytest.mark.parametrize("finished", [0, 1, 2])
def test_a_resumed_run_ends_with_the_same_bytes(case, refitted, finished, monkeypatch, tmp_path):
    out = tmp_path / "out"
    kill_after(monkeypatch, finished)
    with pytest.raises(Killed):
        case.refit(out)
    assert not out.exists()
    monkeypatch.undo()
    report = case.refit(out)
    assert report.resumed == finished
    assert calibrating.weights(out) == calibrating.weights(refitted[0])
    assert calibrating.leftovers(out) == []
    whole = json.loads((refitted[0] / "moemerge_report.json").read_text())["refit"]["layers"]
    assert [row["maps"] for row in report.layers] == [row["maps"] for row in whole]


# --- parked elsewhere ---------------------------------------------------------------------------


def test_where_activations_wait_does_not_matter(case, refitted, tmp_path):
    report = case.refit(tmp_path / "out", offload="disk")
    assert report.offload == "disk"
    assert calibrating.weights(tmp_path / "out") == calibrating.weights(refitted[0])


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["source", "merged"])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.1.mlp.experts.5.up_proj.weight",
        "model.layers.1.mlp.gate.weight",
    ],
)
def test_nan_is_named_and_nothing_is_written(case, who, name, tmp_path):
    sources, merged = dict(case.sources), case.merged
    if who == "source":
        sources["code"] = zoo.spoilt(case.sources["code"], tmp_path / "bad", name)
    else:
        merged = zoo.spoilt(case.merged, tmp_path / "bad", name, float("inf"))
    with pytest.raises(NumericalError, match=r"bad.*(layers\.1|layer 1)"):
        replace(case, merged=merged).refit(tmp_path / "out", sources=sources, **FAST)
    assert not (tmp_path / "out").exists()
    assert calibrating.leftovers(tmp_path / "out") == []


def test_states_of_a_source_that_overflow_are_named(case, tmp_path):
    """Its weights are finite; what they give is not."""
    name = "model.layers.0.self_attn.o_proj.weight"
    bad = zoo.spoilt(case.sources["code"], tmp_path / "bad", name, 3e38)
    with pytest.raises(NumericalError, match=r"bad: non-finite .* layer 0.* domain code"):
        case.refit(tmp_path / "out", sources={**case.sources, "code": bad}, **FAST)
    assert not (tmp_path / "out").exists()
    assert calibrating.leftovers(tmp_path / "out") == []


def test_a_source_of_another_shape(case, zoo_folder, tmp_path):
    for other, error in (
        (zoo_folder("olmoe", num_hidden_layers=3), "has 3 layers"),
        (zoo_folder("olmoe", num_hidden_layers=2, intermediate_size=16), "down_proj is"),
        (zoo_folder("mixtral"), "mixtral"),
    ):
        with pytest.raises(ArchitectureError, match=error):
            case.refit(tmp_path / "out", sources={**case.sources, "code": other}, **FAST)
    assert not (tmp_path / "out").exists()


def test_too_little_memory_is_told_before_a_weight_is_read(case, tmp_path, monkeypatch):
    read = []
    monkeypatch.setattr(streaming, "available_memory", lambda device: 100_000)
    monkeypatch.setattr(Checkpoint, "read", lambda self, name, *rest: read.append(name))
    with pytest.raises(ResourceError, match=r"refit needs about .*B on cpu"):
        case.refit(tmp_path / "out", **FAST)
    assert read == []
    assert not list(tmp_path.iterdir())


def test_names_text_and_weights_must_fit(case, tmp_path):
    bad = [
        (UsageError, "source 'code' has no data", {"data": {"math": case.data["math"]}}),
        (UsageError, "a weight for 'maths'", {"weights": {"maths": 2.0}}),
        (UsageError, "the weight of 'math' is 0", {"weights": {"math": 0.0}}),
        (ConfigError, "ridge auto is chosen on held-out rows", {"holdout": 0.0}),
        (ConfigError, "unknown part 'expert'", {"parts": "expert"}),
        (ConfigError, "expected auto, or a number above 0", {"ridge": -1}),
        (UsageError, "would round the weights that are kept", {"dtype": "bfloat16"}),
    ]
    for error, words, options in bad:
        with pytest.raises(error, match=words):
            case.refit(tmp_path / "out", **options)
    empty = zoo.write_rows(tmp_path / "empty.jsonl", [])
    with pytest.raises(DataError):
        case.refit(tmp_path / "out", data={**case.data, "code": empty})
    assert not (tmp_path / "out").exists()


def test_auto_holds_out_a_tenth_of_few_rows():
    for settings in (RefitSettings, DistillSettings):
        for values in ({}, {"holdout": "auto"}):
            assert parse_settings(settings, values, "settings").holdout == 0.1


def test_text_too_short(case, tmp_path):
    """A lone row cannot be held out; few tokens cannot determine an expert, which is said."""
    short = zoo.write_rows(tmp_path / "short.jsonl", [{"text": "the sum of one and two"}])
    data = {**case.data, "code": short}
    with pytest.raises(DataError, match="leaves none to calibrate on"):
        case.refit(tmp_path / "out", data=data)
    data = dict.fromkeys(case.data, short)
    notes = zoo.Notes()
    options = {"ridge": 0.1, "holdout": 0.0, "progress": notes}
    report = case.refit(tmp_path / "out", data=data, **options)
    (told,) = [notice for notice in report.notices if "by fewer tokens than inputs" in notice]
    assert "expert" in told
    assert " (0 of " in told
    assert any("the result may be worse than the merge" in note for note in notes.said)
    assert told in notes.said  # not only in the report


def test_strict_refuses_a_map_that_stays_as_merged(case, tmp_path):
    """Text of the one domain under the other's name: held-out rows of a lone row lose."""
    rows = [{"text": "the sum of one and two"}, {"text": "def code return print for in range"}]
    short = zoo.write_rows(tmp_path / "short.jsonl", rows)
    data = dict.fromkeys(case.data, short)
    options = {"ridge": 1e-6, "holdout": 0.5, "router": "keep", "data": data}
    report = case.refit(tmp_path / "out", **options)
    assert any("keeps its merged weights: held-out rows would lose" in n for n in report.notices)
    with pytest.raises(NumericalError, match="keeps its merged weights"):
        case.refit(tmp_path / "strict", strict=True, **options)
    assert not (tmp_path / "strict").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["device", "cpu"])
@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_the_device_does_not_matter(family, offload, zoo_folder, tmp_path):
    case = make_case(zoo_folder(family), tmp_path / "case")
    settings = {"ridge": 0.01, "holdout": 0.2, "router": "keep"}
    case.refit(tmp_path / "cpu", device="cpu", **settings)
    case.refit(tmp_path / "gpu", device="cuda", offload=offload, **settings)
    before, one, two = (zoo.tensors(p) for p in (case.merged, tmp_path / "cpu", tmp_path / "gpu"))
    assert calibrating.changed_tensors(case.merged, tmp_path / "gpu")
    for name, tensor in one.items():
        move = (tensor.double() - before[name].double()).norm()
        assert (tensor.double() - two[name].double()).norm() <= 2e-2 * move + 1e-6, name


@pytest.mark.gpu
def test_a_bfloat16_checkpoint_gains(zoo_folder, tmp_path):
    base = zoo_folder("olmoe", dtype=torch.bfloat16)
    case = make_case(base, tmp_path / "case", rows=60, scale=0.1)
    report = case.refit(tmp_path / "out", device="cuda")
    assert report.dtype == "bfloat16"
    last = report.layers[-2]
    for name, drift in last["drift_after"].items():
        assert drift < last["drift_before"][name]
    again = case.refit(tmp_path / "again", device="cuda")
    assert calibrating.weights(tmp_path / "out") == calibrating.weights(tmp_path / "again")
    assert [layer["maps"] for layer in again.layers] == [layer["maps"] for layer in report.layers]


@pytest.mark.gpu
@pytest.mark.parametrize("ridge", SMALL)
@pytest.mark.parametrize("tokens", [5_000, 200_000])
def test_sums_of_bfloat16_values(tokens, ridge):
    within = {1e-5: 2e-3, 1e-3: 6e-4}[ridge]
    assert_sums_of_bfloat16_values(torch.device("cuda"), tokens, ridge, width=512, within=within)
