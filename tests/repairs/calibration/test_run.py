"""Objectives, targets, holdout, what is reported, and a merge with calibration in one go."""

import json
import re
import shutil
from collections import Counter
from dataclasses import replace

import pytest
import torch
import yaml

import moemerge
import zoo
from moemerge.checkpoint import format_size
from moemerge.config.repair_settings import CalibrationSettings
from moemerge.errors import ConfigError, UsageError
from moemerge.repairs.harc import calibrate as harc
from moemerge.repairs.harc_report import holdout_notices
from moemerge.repairs.inputs import RepairRequest
from moemerge.runtime.progress import Silent
from moemerge.text import domains
from repairs.calibration import cases, dense

ROW = {
    "layer", "router", "tokens", "status", "iterations", "residual", "kl_before", "kl_after",
    "mismatch_before", "mismatch_after", "seconds",
}  # fmt: skip


# --- objectives and targets ---------------------------------------------------------------------


def test_the_exact_objective_is_no_worse_than_the_quadratic(case_of, tmp_path):
    case = case_of("olmoe", scale=0.8)
    report = case.calibrate(tmp_path / "out", objective="exact")
    for row in report.layers:
        kl = row["exact"]["kl"]
        assert kl["exact"] < kl["quadratic"]
        assert kl["exact"] < kl["merged"]
        assert sum(row["kl_after"].values()) == pytest.approx(kl["exact"], rel=1e-3)


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3"])
def test_source_features_are_the_sources_own_routing(family, case_of, tmp_path):
    case = case_of(family)
    paper = case.calibrate(tmp_path / "paper")
    report = case.calibrate(tmp_path / "out", targets="source-features")
    for row in report.layers:
        assert sum(row["kl_after"].values()) < sum(row["kl_before"].values())
        assert row["kl_before"] != row["router_on_features"]["kl_before"]
    # In the first layers both see the same features: there, the merged router is the same start.
    first, theirs = report.layers[0], paper.layers[0]
    for name in case.sources:
        on_features = first["router_on_features"]["kl_before"][name]
        assert on_features == pytest.approx(theirs["kl_before"][name], rel=1e-6)


def test_source_features_agree_with_a_forward_of_the_source(case, tmp_path):
    """The last row's divergence, computed from two whole models."""
    report = case.calibrate(tmp_path / "out", targets="source-features")
    row = report.layers[-1]
    logits = []
    for folder in (case.sources["code"], tmp_path / "out"):
        model = dense.load(folder)
        gate = dense.gates(model)[row["router"].removesuffix(".weight")]
        x = dense.router_inputs(model, gate, case.rows()["code"])
        logits.append(x @ gate.weight.detach().double().T)
    log_r, log_p = (torch.log_softmax(z, dim=-1) for z in logits)
    kl = float((log_r.exp() * (log_r - log_p)).sum(dim=-1).mean())
    assert row["kl_after"]["code"] == pytest.approx(kl, rel=1e-3)
    # Mismatch is then what `diagnose` calls so; of the routers alone it is another number.
    found = replace(case, merged=tmp_path / "out").diagnose()
    for told, measured in zip(report.layers, found.layers_of(domain="code"), strict=True):
        assert told["mismatch_after"]["code"] == pytest.approx(measured.mismatch)
        alone = told["router_on_features"]["mismatch_after"]["code"]
        assert alone == pytest.approx(measured.mismatch_on_features)


def test_held_out_rows_are_measured_and_not_solved_on(case, tmp_path):
    report = case.calibrate(tmp_path / "out", holdout=0.25)
    whole = case.calibrate(tmp_path / "whole")
    for row, all_rows in zip(report.layers, whole.layers, strict=True):
        for name in case.sources:
            held = row["holdout"]["tokens"][name]
            assert held > 0
            assert held + row["tokens"][name] == all_rows["tokens"][name]
        assert set(row["holdout"]) == {"tokens", *ROW & {
            "kl_before", "kl_after", "mismatch_before", "mismatch_after"}}  # fmt: skip
    assert cases.weights(tmp_path / "out") != cases.weights(tmp_path / "whole")
    assert report.totals["holdout"]["kl_after"].keys() == case.sources.keys()


@pytest.mark.parametrize("mean", [1.0, 10.0])
def test_features_with_a_mean_and_sure_routers_take_few_steps(mean, zoo_folder, tmp_path):
    base = zoo_folder("olmoe", hidden_size=128, num_experts=32, num_experts_per_tok=4)
    hard = cases.with_a_mean(base, tmp_path / "base", mean=mean, sharpness=6.0)
    report = cases.make_case(hard, tmp_path).calibrate(tmp_path / "out")
    solves = [(row["status"], row["iterations"] <= 60) for row in report.to_json()["layers"]]
    assert solves == [("converged", True)] * 3


@pytest.mark.parametrize(
    "how",
    [{"dtype": "bfloat16"}, pytest.param({"device": "cuda"}, marks=pytest.mark.gpu)],
    ids=["cpu", "gpu"],
)
def test_lower_precision_of_the_forward(how, case_of, tmp_path):
    """On a GPU a bfloat16 checkpoint runs in bfloat16."""
    case = case_of("olmoe", dtype=torch.bfloat16)
    report = case.calibrate(tmp_path / "out", **how)
    assert report.dtype == "bfloat16"
    for row in report.layers:
        assert row["status"] == "converged"
        assert sum(row["kl_after"].values()) < sum(row["kl_before"].values())


# --- how much a source counts -------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"objective": "exact", "targets": "source-features"}])
def test_a_heavy_source_is_agreed_with(settings, case, tmp_path):
    plain = case.calibrate(tmp_path / "plain", **settings)
    heavy = case.calibrate(tmp_path / "heavy", weights={"math": 9.0}, **settings)
    assert heavy.weights == {"math": 1.8, "code": 0.2}
    assert heavy.to_json()["weights"] == heavy.weights
    for before, after in zip(plain.layers[:1], heavy.layers[:1], strict=True):
        assert after["kl_after"]["math"] < before["kl_after"]["math"]
        assert after["kl_after"]["code"] > before["kl_after"]["code"]
    config = yaml.safe_load((tmp_path / "heavy" / "moemerge_config.yml").read_text())
    assert config["calibration"]["weights"] == {"math": 9.0}


@pytest.mark.parametrize("weights", [{"math": 1e308, "code": 1e308}, {"math": 1e-200}])
def test_weights_out_of_range_are_refused(weights, case, tmp_path):
    with pytest.raises(UsageError, match="expected a number from 1e-09 to 1e"):
        case.calibrate(tmp_path / "out", weights=weights)


def test_the_base_is_recognised_by_its_folder(case, tmp_path, monkeypatch):
    merged = shutil.copytree(case.merged, tmp_path / "merged")
    (tmp_path / "link").symlink_to(case.sources["code"])
    (merged / "moemerge_config.yml").write_text(f"base_model: {tmp_path / 'link'}\n")
    monkeypatch.chdir(case.sources["code"].parent)
    sources = {"math": case.sources["math"], "code": f"./{case.sources['code'].name}"}
    report = replace(case, merged=merged).calibrate(tmp_path / "out", sources=sources)
    assert not any("no source is the base" in notice for notice in report.notices)


# --- what is told -------------------------------------------------------------------------------


def test_every_layer_is_told(case, tmp_path):
    notes = zoo.Notes()
    report = case.calibrate(tmp_path / "out", progress=notes)
    assert len(notes.said) == 5
    assert "no source is the base model" in notes.said[0]
    read, need = format_size(report.bytes_read["files"]), format_size(report.memory)
    assert notes.said[1] == f"calibrate reads {read} of 1 model, and needs about {need} on cpu"
    pattern = r"layer {}: \d+ steps, residual \d\.\de-\d\d, KL \S+ → \S+{}"
    assert re.fullmatch(pattern.format(1, r", \d+ s left"), notes.said[-2])
    assert re.fullmatch(pattern.format(2, ""), notes.said[-1])
    # The time of the first layer has the warm-up, so it is no estimate of the others'.
    assert [note.endswith("s left") for note in notes.said[2:]] == [False, True, False]


def test_the_report_and_the_card(case, tmp_path):
    report = case.calibrate(tmp_path / "out")
    written = json.loads((tmp_path / "out" / "moemerge_report.json").read_text())
    assert "merge" not in written
    part = written["calibration"]
    given = json.loads(json.dumps(report.to_json()))
    # The file was written before the end: what came after is only told.
    assert given.pop("seconds") >= part.pop("seconds")
    told, stored = given.pop("timings"), part.pop("timings")
    assert told["seconds"].pop("write") >= 0
    assert told["seconds"] == stored["seconds"]
    assert told["solved"] == stored["solved"]
    assert part == given
    assert all(set(row) >= ROW for row in part["layers"])
    assert part["totals"]["routers"] == part["totals"]["converged"] == 3
    card = (tmp_path / "out" / "README.md").read_text()
    assert "calibrated with HARC" in card
    assert "| math |" in card


def test_the_card_names_the_rows_held_out_and_its_figures(case, tmp_path):
    report = case.calibrate(tmp_path / "out", holdout=0.3)
    card = (tmp_path / "out" / "README.md").read_text()
    seen, unseen = card.split("The same on held-out rows")
    assert "both routers on this model's features" in seen
    for part, total in ((seen, report.totals), (unseen, report.totals["holdout"])):
        assert "mismatch, routers alone before" in part
        assert f"| math | {total['tokens']['math']} | {total['kl_before']['math']:.4g} |" in part
    case.calibrate(tmp_path / "own", targets="source-features")
    card = (tmp_path / "own" / "README.md").read_text()
    assert "each model on its own features" in card
    assert "| mismatch before |" in card


def test_what_is_read_is_read_once(case, tmp_path, monkeypatch):
    """With a page, the text."""
    pytest.importorskip("plotly")
    read = Counter()
    tokenize = domains.tokenize

    def counted(*given):
        read["text"] += 1
        return tokenize(*given)

    monkeypatch.setattr(domains, "tokenize", counted)
    case.calibrate(tmp_path / "other", report=tmp_path / "page.html")
    assert read["text"] == len(case.sources)


def test_few_tokens_are_told(case, tmp_path):
    (about_the_base,) = case.calibrate(tmp_path / "enough").notices
    assert "no source is the base" in about_the_base
    report = case.calibrate(tmp_path / "few", limit=1)
    for name in case.sources:
        tokens = report.totals["tokens"][name]
        wanted = f"{name}: {tokens} tokens are few for routers of width {zoo.HIDDEN}"
        assert any(notice.startswith(wanted) for notice in report.notices)
    # The exact objective has no damping, and needs more.
    report = case.calibrate(tmp_path / "exact", objective="exact", measure=False)
    assert sum("may be worse than the merge" in n for n in report.notices) == len(case.sources)


def test_a_rise_on_rows_held_out_is_told():
    held = {"kl_before": {"math": 0.1, "code": 0.3}, "kl_after": {"math": 0.2, "code": 0.1}}
    (notice,) = holdout_notices({"holdout": held})
    assert notice.startswith("math: on the rows held out the routing divergence rose from 0.1 to")
    assert holdout_notices({}) == []


def test_a_card_that_somebody_wrote_is_kept(case, tmp_path):
    merged = shutil.copytree(case.merged, tmp_path / "merged")
    (merged / "README.md").write_text("---\nlicense: mit\n---\n# Mine\n\nA story.\n")
    cases.Case(merged, case.sources, case.data).calibrate(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlicense: mit\n---\n# Mine\n\nA story.\n\n## Router calibration\n")


def test_the_resolved_config_makes_the_model_again(case, tmp_path):
    case.calibrate(tmp_path / "out", gamma=0.2, layers="1-2")
    moemerge.run(tmp_path / "out" / "moemerge_config.yml", tmp_path / "again")
    assert not cases.changed_tensors(tmp_path / "again", tmp_path / "out")


def test_a_card_does_not_promise_what_rows_in_memory_take_away(case, tmp_path):
    data = {name: [{"text": text} for text in cases.texts(p)] for name, p in case.data.items()}
    case.calibrate(tmp_path / "out", data=data, layers="1")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "The resolved configuration, which lacks rows that were in memory:" in card


# --- merge and calibrate ------------------------------------------------------------------------


def calibrated_config(case, **settings):
    return zoo.linear(
        case.sources,
        tokenizer={"source": str(case.sources["math"])},
        data={name: str(path) for name, path in case.data.items()},
        calibration={"alpha": 0.7, **settings},
    )


@pytest.fixture
def with_tokenizers(case, tmp_path):
    sources = {}
    for name, path in case.sources.items():
        sources[name] = tmp_path / "models" / name
        shutil.copytree(path, sources[name])
        zoo.tiny_tokenizer(sources[name])
    return cases.Case(case.merged, sources, case.data)


def test_the_advice_to_add_the_base_can_be_followed(with_tokenizers, tmp_path):
    case = with_tokenizers
    base = shutil.copytree(case.merged, tmp_path / "olmo-7b")
    config = {**calibrated_config(case, layers="1", measure=False), "base_model": str(base)}
    config["merge_method"] = "task_arithmetic"
    report = moemerge.run(config, tmp_path / "out")
    assert report.calibration is not None
    (notice,) = report.calibration.notices
    assert notice.endswith("add `base: general.jsonl` under `data:`")
    config["data"]["base"] = str(case.data["math"])
    report = moemerge.run(config, tmp_path / "followed")
    assert report.calibration is not None
    assert list(report.calibration.sources) == ["math", "code", "base"]
    assert report.calibration.notices == ()


def test_an_interrupted_run_merges_again_and_goes_on(with_tokenizers, tmp_path):
    config = calibrated_config(with_tokenizers)
    out = tmp_path / "results" / "out"
    with pytest.raises(KeyboardInterrupt):
        moemerge.run(config, out, progress=cases.Interrupting("layer 1:"))
    assert [path.name for path in out.parent.iterdir()] == [".out.journal"]
    report = moemerge.run(config, out)
    assert report.calibration is not None
    assert report.calibration.resumed == 2
    moemerge.run(config, tmp_path / "whole")
    assert cases.weights(out) == cases.weights(tmp_path / "whole")
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_settings_given_to_run_beat_the_config(with_tokenizers, tmp_path):
    config = calibrated_config(with_tokenizers)
    report = moemerge.run(config, tmp_path / "out", calibration={"gamma": 0.1, "layers": "2"})
    assert report.calibration is not None
    settings = report.calibration.settings
    assert (settings["alpha"], settings["gamma"]) == (None, 0.1)
    assert [row["layer"] for row in report.calibration.layers] == [2]
    text = (tmp_path / "out" / "moemerge_config.yml").read_text()
    assert "gamma: 0.1" in text
    assert "alpha" not in text
    with pytest.raises(ConfigError, match="rtol"):
        moemerge.run(config, tmp_path / "two", calibration={"rtol": 2.0})


def test_without_writing_the_same_routers_are_solved(case, tmp_path):
    written = case.calibrate(tmp_path / "out")
    request = RepairRequest(
        merged=case.merged,
        out=tmp_path / "none",
        sources=case.sources,
        data={name: [path] for name, path in case.data.items()},
        settings=CalibrationSettings(),
        write=False,
    )
    report = harc.run(request, Silent())
    kept = ("router", "iterations", "residual", "kl_after")
    assert [[row[k] for k in kept] for row in report.layers] == [
        [row[k] for k in kept] for row in written.layers
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
