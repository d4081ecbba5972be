"""The demo computes what it shows, on any trained set, and clears away only what is its own."""

import json
import subprocess
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from evidence import training
from evidence.scoring import accuracy_many
from evidence.training import TEST_PROBLEMS, TEST_SEED
from moemerge import api
from moemerge.lab.testbed import bundled_set
from moemerge.lab.testbed.demo import (
    AS_MERGED,
    AVERAGED,
    HARC,
    REFIT,
    SOURCE,
    SPECIALIST,
    DemoRow,
    RoutingAgreement,
    compare_routing,
    draw_test_problems,
    findings,
)
from moemerge.lab.testbed.tasks import problems
from terminal import moemerge, succeed


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "TEST_PROBLEMS", 4)
        job = training.Job(tmp_path_factory.mktemp("sets") / "set", "tiny", steps_scale=0.002)
        return training.train([job], device="cpu")[0]


@pytest.mark.slow
def test_every_row_is_a_model_that_was_made_and_measured(trained, tmp_path):
    folder = tmp_path / "demo"
    result = succeed("demo", folder, "--set", trained.folder, "--problems", "8", "--json")
    found = json.loads(result.stdout)
    rows = {(row["model"], row["routers"]): row for row in found["rows"]}
    assert list(rows)[:3] == [("base", ""), ("math", SPECIALIST), ("code", SPECIALIST)]
    for method, more in (("WUDI", [REFIT]), ("TIES", [])):
        made = [routers for name, routers in rows if name == method]
        assert made == [AS_MERGED, AVERAGED, HARC, SOURCE, *more]
    assert (folder / "report.html").exists() == (found["page"] is not None)


def test_a_folder_that_is_no_demo_is_left_alone(trained, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    result = moemerge("demo", tmp_path, "--set", trained.folder)
    assert result.exit_code == 2
    assert "is not a demo folder" in result.stderr
    assert (tmp_path / "thesis.txt").exists()


def test_calibration_heals_what_merging_broke(tmp_path):
    """The bundled specialists, with fewer rows than the demo takes."""
    trained = bundled_set()
    models = {domain: trained.models[domain] for domain in ("math", "code")}
    data = {domain: trained.data[domain] for domain in models}
    merged, harc = tmp_path / "merged", tmp_path / "harc"
    entries = [{"model": str(path), "name": name} for name, path in models.items()]
    parameters = {"density": 0.6, "weight": 0.5}
    config = {"merge_method": "ties", "base_model": str(trained.base), "models": entries}
    api.merge({**config, "parameters": parameters}, merged)
    api.calibrate(merged, harc, sources=models, data=data, limit=64, device="cpu")
    texts = {
        domain: [p.prompt + p.answer for p in draw_test_problems(domain, 20)] for domain in models
    }
    broken, healed = (compare_routing(m, models, texts, device="cpu") for m in (merged, harc))
    for domain in models:
        assert broken[domain].mismatch > 0.25
        assert healed[domain].mismatch < broken[domain].mismatch - 0.05
        assert healed[domain].kl < broken[domain].kl / 2


def row(model, routers, solved, mismatch):
    agreement = RoutingAgreement(mismatch, 1.0, 0.1, (), (), 10)
    domains = ("math", "code")
    return DemoRow(
        model,
        routers,
        "folder",
        dict.fromkeys(domains, solved),
        dict.fromkeys(domains, agreement),
        1.0,
    )


def test_findings_say_what_the_numbers_say_whichever_way_they_went():
    rows = [row("base", "", 0.1, 0.5)]
    rows += [row(domain, SPECIALIST, 0.7, 0.0) for domain in ("math", "code")]
    for method in ("WUDI", "TIES"):
        rows += [row(method, AS_MERGED, 0.5, 0.4), row(method, AVERAGED, 0.55, 0.3)]
        rows += [row(method, HARC, 0.48, 0.2), row(method, SOURCE, 0.62, 0.15)]
    rows.insert(-4, row("WUDI", REFIT, 0.66, 0.1))
    wudi, refit, ties = findings(rows)
    assert refit == "WUDI: refitting every linear map wins 16.0."
    assert wudi.startswith("WUDI: merging changed 40% of the specialists' expert choices")
    assert "cost 20.0 of the 70.0 points they score" in wudi
    assert "HARC wins -2.0 of them back, with source targets 12.0" in wudi
    assert "routers merely averaged, the control, 5.0." in ties


def test_where_the_specialists_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shown = moemerge("demo", "--path")
    assert shown.stdout == f"{bundled_set().folder}\n"
    assert not list(tmp_path.iterdir())


LARGEST = 12 * 10**6  # bytes that the package gives to them
ASKED = 45  # of each domain: a sample of what the manifest counts


def test_it_is_small_and_says_how_it_was_made():
    bundle = bundled_set()
    size = sum(path.stat().st_size for path in bundle.folder.rglob("*") if path.is_file())
    assert size < LARGEST
    assert "train --preset demo" in bundle.manifest["command"]
    assert {"seed", "date", "versions", "steps", "final_loss"} <= bundle.manifest.keys()
    assert list(bundle.models) == ["math", "code", "chat"]


def test_transformers_loads_it_and_gets_an_answer_right():
    bundle = bundled_set()
    model = AutoModelForCausalLM.from_pretrained(bundle.models["code"], dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(bundle.models["code"])
    prompt = "[x+3 for x in [7,2,5]][1:]="
    asked = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    written = model.generate(**asked, max_new_tokens=12, do_sample=False)[0]
    words = tokenizer.convert_ids_to_tokens(written.tolist())
    assert "".join(words).endswith("=[5,8]<eos>")


def test_specialists_know_their_domain_better_than_the_base():
    bundle = bundled_set()
    for domain, model in bundle.models.items():
        whole = problems(domain, split="test", count=TEST_PROBLEMS, seed=TEST_SEED)
        base, own = accuracy_many([bundle.base, model], whole[:ASKED], device="cpu")
        told = bundle.manifest["accuracy"]
        for right, name in ((base, "base"), (own, domain)):
            assert abs(sum(right) / ASKED - told[name][domain]) < 0.2
        assert told[domain][domain] > told["base"][domain]
        assert sum(own) >= sum(base)


def test_the_path_is_printed_without_importing_torch():
    command = [sys.executable, "-X", "importtime", "-m", "moemerge", "demo", "--path"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.strip() == str(bundled_set().folder)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "moemerge.lab.testbed" in imported
    assert "torch" not in imported
