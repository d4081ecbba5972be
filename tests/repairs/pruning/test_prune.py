"""`moemerge prune`: scores, layouts, configs, repairs, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

import moemerge
import quantised_zoo as qz
import zoo
from collecting.direct import whole_model
from moemerge.errors import (
    ArchitectureError,
    ConfigError,
    DataError,
    NumericalError,
    UsageError,
)
from moemerge.lab.study.plan import in_order, plan_study
from moemerge.lab.study.run import Bench
from moemerge.lab.study.settings import StudySettings
from repairs.calibration import cases
from repairs.pruning.cases import slice_experts
from repairs.refitting.cases import Killed, kill_after, make_case
from repairs.refitting.dense import run, sent
from terminal import succeed

CPU = {"device": "cpu"}


@pytest.fixture(scope="module")
def base(zoo_folder):
    return zoo_folder("olmoe", num_hidden_layers=2, tokenizer=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return {"text": cases.write_text(tmp_path_factory.mktemp("data") / "t.jsonl", seed=1, rows=40)}


def scores_of(folder, file):
    """The mean w ‖output‖ of every expert, from a whole model in transformers."""
    rows, model = cases.token_rows(folder, file), whole_model(folder)
    found = {}
    for path, module in model.named_modules():
        if not path.endswith("mlp.experts"):
            continue
        x, chosen, weights = (run(model, rows, [path])[path].argument(at) for at in range(3))
        sums = torch.zeros(module.num_experts, dtype=torch.float64)
        for expert in range(module.num_experts):
            mine, w = sent(chosen, weights, expert)
            inner = module._apply_gate(x[mine] @ module.gate_up_proj[expert].T)
            norms = (inner @ module.down_proj[expert].T).norm(dim=1, keepdim=True)
            sums[expert] = (w * norms).sum() / max(1, len(mine))
        found[path.split(".")[2]] = sums
    return found


def test_the_score_is_reaps_and_the_rest_is_sliced(base, data, tmp_path):
    out = tmp_path / "out"
    report = moemerge.prune(base, out, data=data, keep=0.6, holdout=0.0, **CPU).pruning
    expected = scores_of(base, data["text"])
    for layer, scores in expected.items():
        torch.testing.assert_close(
            torch.tensor(report.scores[layer]).double(), scores, rtol=1e-4, atol=1e-6
        )
        best = sorted(scores.topk(5).indices.tolist())
        assert report.kept[layer] == best
    kept = {int(layer): ids for layer, ids in report.kept.items()}
    by_hand = slice_experts(base, tmp_path / "by-hand", kept)
    zoo.assert_same(out, by_hand)
    assert zoo.read_config(out)["num_experts"] == 5
    zoo.assert_loads(out)
    written = json.loads((out / "moemerge_report.json").read_text())["prune"]
    assert (written["experts_before"], written["experts_after"]) == (8, 5)
    assert "5 of 8 experts" in (out / "README.md").read_text()


def outputs_of(module, x):
    """The outputs of all experts on the same tokens, (experts, tokens, d)."""
    inner = [module._apply_gate(x @ up.T) for up in module.gate_up_proj]
    return torch.stack([y @ down.T for y, down in zip(inner, module.down_proj, strict=True)])


def test_similar_experts_are_removed_first(base, data, tmp_path):
    """Expert 3 of layer 1 is made a copy of expert 5: of the two, the lesser has score 0."""
    twin = tmp_path / "twin"
    with zoo.edited(base, twin) as tensors:
        for name in [n for n in tensors if ".layers.1.mlp.experts.5." in n]:
            tensors[name.replace(".experts.5.", ".experts.3.")] = tensors[name].clone()
    short = tmp_path / "short.jsonl"  # few tokens, so that all of them are compared
    short.write_text("".join(data["text"].read_text().splitlines(keepends=True)[:4]))
    options = {"data": {"text": short}, "holdout": 0.0, **CPU}
    report = moemerge.prune(twin, tmp_path / "out", score="similarity", **options).pruning
    reap = moemerge.prune(twin, tmp_path / "reap", **options).pruning.scores["1"]
    lesser = min((3, 5), key=lambda expert: (reap[expert], -expert))
    assert report.scores["1"][lesser] == 0.0
    assert lesser not in report.kept["1"]

    rows = cases.token_rows(twin, short)
    model, path = whole_model(twin), "model.layers.1.mlp.experts"
    x, chosen, weights = (run(model, rows, [path])[path].argument(at) for at in range(3))
    outputs = outputs_of(model.get_submodule(path), x)
    for expert in range(8):
        mine, w = sent(chosen, weights, expert)
        gaps = (outputs[:, mine] - outputs[expert, mine]).norm(dim=2)  # (experts, tokens)
        means = (w.reshape(-1) * gaps).mean(dim=1)
        ahead = [e for e in range(8) if (reap[e], -e) > (reap[expert], -expert)]
        if ahead:
            expected = min(float(means[e]) for e in ahead)
            assert report.scores["1"][expert] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_other_scores(base, data, tmp_path):
    options = {"data": data, "holdout": 0.0, **CPU}
    scores = {
        score: moemerge.prune(base, tmp_path / score, score=score, **options).pruning.scores
        for score in ("reap", "norm", "frequency")
    }
    for layer, tokens in scores["frequency"].items():
        assert all(count == int(count) for count in tokens)
        sums = torch.tensor(tokens) * torch.tensor(scores["reap"][layer])
        torch.testing.assert_close(torch.tensor(scores["norm"][layer]), sums, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "fused"),
    [
        ("gpt_oss", False),
        ("deepseek_v3", False),
        ("mixtral", True),
        ("granitemoe", False),
        ("ernie4_5_moe", False),
    ],
)
def test_layouts_load_and_are_repaired_in_one_run(family, fused, zoo_folder, data, tmp_path):
    """Groups keep the same number of experts each; the repair finds the map in the report."""
    folder = zoo_folder(family, fused=fused, tokenizer=True)
    out, repair = tmp_path / "out", "calibrate" if family == "deepseek_v3" else "refit"
    report = moemerge.prune(folder, out, data=data, repair=repair, **CPU)
    assert report.repair is not None
    assert report.repair.experts["text"].keys() == {int(n) for n in report.pruning.kept}
    for ids in report.pruning.kept.values():
        assert len(ids) == 6
        assert family != "deepseek_v3" or sum(expert < 4 for expert in ids) == 3
    zoo.assert_loads(out)
    document = json.loads((out / "moemerge_report.json").read_text())
    assert {"prune", report.repair.repair.key} <= document.keys()
    assert "## Pruned experts" in (out / "README.md").read_text()
    assert cases.leftovers(out) == []
    diagnosis = moemerge.diagnose(out, sources={"text": folder}, data=data, **CPU)
    assert diagnosis.total("text").mismatch < 0.5


@pytest.mark.parametrize("kind", ["qwen fp8", "gpt-oss mxfp4", "int4 with zeros"])
def test_a_quantised_model_keeps_its_codes(kind, zoo_folder, data, tmp_path):
    form = qz.KINDS[kind]
    plain = zoo_folder(form.family, dtype=torch.bfloat16, **form.sizes)
    folder = form.publish(plain, tmp_path / "base")
    zoo.tiny_tokenizer(folder)
    out = tmp_path / "out"
    report = moemerge.prune(folder, out, data=data, **CPU).pruning
    kept = {int(layer): ids for layer, ids in report.kept.items()}
    floats = qz.plain_copy(folder, tmp_path / "floats")
    expected = zoo.tensors(slice_experts(floats, tmp_path / "by-hand", kept))
    with moemerge.Checkpoint.open(out) as written:
        assert written.quantisation is not None
        assert set(written) == set(expected)
        assert all(torch.equal(written[name], expected[name]) for name in written)


def test_layers_beyond_the_model_are_dropped(zoo_folder, data, tmp_path):
    """A fourth layer on disk (multi-token prediction) has no scores."""
    folder = zoo.add_layer(zoo_folder("glm4_moe", tokenizer=True), tmp_path / "base")
    zoo.edit_config(folder, num_nextn_predict_layers=1)
    report = moemerge.prune(folder, tmp_path / "out", data=data, **CPU).pruning
    assert any("layers 3 (multi-token prediction) are dropped" in n for n in report.notices)
    assert not any("layers.3." in name for name in zoo.tensors(tmp_path / "out"))
    assert zoo.read_config(tmp_path / "out")["num_nextn_predict_layers"] == 0
    zoo.assert_loads(tmp_path / "out")


def test_a_repair_by_gradient_steps(base, data, tmp_path):
    report = moemerge.prune(base, tmp_path / "out", data=data, repair="gradient", limit=8, **CPU)
    assert report.repair is not None
    assert report.repair.to_json()["settings"]["solver"] == "gradient"
    zoo.assert_loads(tmp_path / "out")


def test_a_refit_holds_out_rows_that_were_not_scored(base, data, tmp_path):
    """Also of few rows: a λ that is chosen on none is the largest, which repairs least."""
    options = {"data": data, "keep": 0.75, "measure": False, **CPU}
    alone = moemerge.prune(base, tmp_path / "alone", **options)
    done = moemerge.prune(base, tmp_path / "out", repair="refit", **options)
    assert done.repair.not_held_out == ()
    assert sum(done.repair.held_out_tokens.values()) > 0
    assert sum(done.pruning.tokens.values()) < sum(alone.pruning.tokens.values())


def test_a_killed_repair_is_resumed(base, data, tmp_path, monkeypatch):
    options = {"data": data, "repair": "refit", **CPU}
    moemerge.prune(base, tmp_path / "whole", **options)
    with monkeypatch.context() as patch:
        kill_after(patch, 1)
        with pytest.raises(Killed):
            moemerge.prune(base, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    report = moemerge.prune(base, tmp_path / "out", resume=True, **options)
    assert report.repair is not None
    assert report.repair.resumed == 1
    assert cases.weights(tmp_path / "out") == cases.weights(tmp_path / "whole")


def test_a_config_prunes_the_merge_before_its_refit(base, data, tmp_path):
    """Sources have more experts than the pruned merge; the config in OUT makes it again."""
    case = make_case(base, tmp_path)
    config = zoo.linear(
        case.sources,
        data={name: str(path) for name, path in case.data.items()},
        prune={"keep": 0.75, "holdout": 0.2, "device": "cpu"},
        refit={"ridge": 0.01, "holdout": 0.2, "device": "cpu", "measure": False},
    )
    out = tmp_path / "out"
    for path in case.sources.values():
        zoo.tiny_tokenizer(path)
    report = moemerge.run(config, out)
    assert report.prune is not None
    assert report.refit is not None
    assert report.refit.experts.keys() == case.sources.keys()
    assert zoo.read_config(out)["num_experts"] == 6
    document = json.loads((out / "moemerge_report.json").read_text())
    assert {"merge", "prune", "refit"} <= document.keys()
    moemerge.run(out / "moemerge_config.yml", tmp_path / "again")
    assert cases.weights(tmp_path / "again") == cases.weights(out)
    # The command writes a config, too.
    moemerge.prune(base, tmp_path / "one", data=data, repair="refit", measure=False, **CPU)
    moemerge.run(tmp_path / "one" / "moemerge_config.yml", tmp_path / "two")
    assert cases.changed_tensors(tmp_path / "one", tmp_path / "two") == set()
    bad = {**config, "prune": {"keep": 0.25}}
    with pytest.raises(UsageError, match="2 of 8 experts would remain"):
        moemerge.validate(bad)
    with pytest.raises(ConfigError, match="not used by pruning"):
        moemerge.validate({**config, "prune": {"weights": {"math": 2.0}}})


def test_a_study_repairs_what_it_prunes(base, tmp_path):
    case = make_case(base, tmp_path)
    for path in case.sources.values():
        zoo.tiny_tokenizer(path)
    task = Path(__file__).parents[3] / "examples" / "paper" / "small" / "math.yml"
    plan = plan_study(
        {
            "sources": {name: str(path) for name, path in case.sources.items()},
            "data": {name: str(path) for name, path in case.data.items()},
            "merges": {"mean": {"merge_method": "linear", "parameters": {"weight": 1}}},
            "repairs": {
                "pruned": {"prune": {"keep": 0.5}},
                "repaired": {"calibrate": {"targets": "source-features"}, "after": "pruned"},
            },
            "evaluate": {"tasks": [str(task)]},
        }
    )
    bench = Bench(plan, tmp_path, StudySettings(device="cpu", keep="models"))
    for one in in_order(plan.cells):
        if one.is_model and not one.is_given:
            assert bench.make(one) is None
    reports = [json.loads(p.read_text()) for p in tmp_path.rglob("moemerge_report.json")]
    (repaired,) = (one for one in reports if "calibration" in one)
    assert repaired["prune"]["experts_after"] == 4
    assert repaired["calibration"]["experts"].keys() == case.sources.keys()


def refused(base, out, error, words, **options):
    with pytest.raises(error, match=words):
        moemerge.prune(base, out, **{**CPU, **options})
    assert not out.exists()
    assert cases.leftovers(out) == []


def test_bad_input_writes_nothing(base, data, zoo_folder, tmp_path):
    out = tmp_path / "out"
    refused(base, out, UsageError, "no text is given", data={})
    refused(base, out, DataError, "nowhere", data={"text": tmp_path / "nowhere.jsonl"})
    for keep in (1.5, 1.0, 0.0, float("nan")):
        refused(base, out, ConfigError, "keep", data=data, keep=keep)
    empty = zoo.write_rows(tmp_path / "empty.jsonl", [])
    refused(base, out, DataError, "empty", data={"text": empty})
    refused(base, out, DataError, "empty", data={"text": empty}, repair="refit")
    refused(base, out, UsageError, "all 8 experts would be kept", data=data, keep=0.99)
    refused(base, out, UsageError, "2 of 8 experts would remain", data=data, keep=0.25)
    refused(base, out, UsageError, "belongs to the repair", data=data, resume=True)
    few = zoo.write_rows(tmp_path / "few.jsonl", [{"text": "a"}])
    refused(base, out, DataError, "the text reaches", data={"text": few}, keep=0.8)
    dense = zoo.dense_llama(tmp_path / "dense", layers=2)
    refused(dense, out, ArchitectureError, "no experts", data=data)
    jetmoe = zoo_folder("jetmoe", tokenizer=True)
    refused(jetmoe, out, ArchitectureError, "several routers", data=data)
    options = {"data": data, "sources": {"text": zoo_folder("qwen3_moe")}, "repair": "refit"}
    refused(base, out, ArchitectureError, "'qwen3_moe', but .* is 'olmoe'", **options)


def test_large_outputs_have_scores_and_infinite_ones_are_refused(base, data, tmp_path):
    for factor in (1e11, 1e30):
        model = tmp_path / f"{factor:.0e}"
        with zoo.edited(base, model) as tensors:
            for name in ("up_proj", "down_proj"):
                tensors[f"model.layers.0.mlp.experts.3.{name}.weight"] *= factor
    out = tmp_path / "out"
    report = moemerge.prune(tmp_path / "1e+11", out, data=data, keep=0.75, **CPU)
    scores = report.pruning.scores["0"]
    assert max(scores) == scores[3] > 1e19
    refused(model, tmp_path / "other", NumericalError, "layer 0", data=data, keep=0.75)


def test_the_command(base, data, tmp_path):
    out, file = tmp_path / "out", tmp_path / "report.json"
    words = ["prune", base, out, "--keep", "0.75", "--data", f"text={data['text']}"]
    result = succeed(*words, "--repair", "refit", "--device", "cpu", "--json", file)
    assert json.loads(file.read_text()).keys() == {"moemerge", "prune", "refit"}
    assert "6 of 8 experts kept" in result.stdout
    # The map of another tool, in a file.
    plain = tmp_path / "kept.json"
    kept = json.loads((out / "moemerge_report.json").read_text())["prune"]["experts"]
    plain.write_text(json.dumps(kept))
    words = ["diagnose", out, "--source", f"text={base}", "--data", f"text={data['text']}"]
    succeed(*words, "--experts", f"text={plain}", "--device", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("repair", ["calibrate", "refit"])
@pytest.mark.parametrize("family", ["olmoe", "gpt_oss", "deepseek_v3"])
def test_a_gpu_prunes_and_repairs_alike(family, repair, zoo_folder, tmp_path):
    base = zoo_folder(family, tokenizer=True)
    options = {
        "data": {"text": cases.write_text(tmp_path / "t.jsonl", seed=1, rows=40)},
        "repair": repair,
        "measure": False,
    }
    reports = {
        device: moemerge.prune(base, tmp_path / device, device=device, **options)
        for device in ("cpu", "cuda")
    }
    assert reports["cpu"].pruning.kept == reports["cuda"].pruning.kept
    one, two = zoo.tensors(tmp_path / "cpu"), zoo.tensors(tmp_path / "cuda")
    for name, tensor in one.items():
        gap = (tensor.double() - two[name].double()).norm()
        assert gap <= 2e-2 * tensor.double().norm() + 1e-6, name
