"""Whole trainings of a few steps: what changes, what stays, and what OUT holds."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import moemerge
import zoo
from lab.tuning.cases import make_base, rows, tune
from moemerge.config.yaml_lines import read_yaml
from moemerge.errors import UsageError
from moemerge.families.opened import open_model
from moemerge.families.roles import Role
from moemerge.forward.trainable import TrainedLayout, load_trainable
from moemerge.text.answers import load_answers
from moemerge.text.domains import TextSettings
from moemerge.text.tokens import load_tokenizer
from repairs.calibration.cases import changed_tensors
from together import job, together


def test_a_tuned_model_is_the_base_with_other_weights(base, tmp_path):
    report = tune(base, tmp_path / "out", steps=8)
    assert report.last_loss < 0.9 * report.first_loss
    assert [point.step for point in report.curve] == list(range(1, 9))
    out = tmp_path / "out"
    assert len(changed_tensors(base, out)) > 0.9 * len(zoo.tensors(base))
    added = {"README.md", "moemerge_config.yml", "moemerge_report.json"}
    assert {p.name for p in out.iterdir()} == {p.name for p in base.iterdir()} | added
    for name in ("config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (base / name).read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"base", "out"}
    AutoModelForCausalLM.from_pretrained(out)


def test_what_was_done_is_told(base, tmp_path):
    report = tune(base, tmp_path / "out", seed=3)
    written = json.loads((tmp_path / "out/moemerge_report.json").read_text())["tuning"]
    assert written["settings"]["seed"] == 3
    assert written["rows"] == 32
    assert written["learnt"] == report.learnt < report.tokens == written["tokens"]
    curve = [point["loss"] for point in written["curve"]]
    assert len(curve) == 4
    assert written["first_loss"] == written["last_loss"] == pytest.approx(sum(curve) / 4)
    assert written["versions"]["trl"]
    config = read_yaml((tmp_path / "out/moemerge_config.yml").read_text(), "x").data["tune"]
    assert (config["learning_rate"], config["batch"], config["aux_loss"]) == (1e-2, 8, 0.0)
    card = (tmp_path / "out/README.md").read_text()
    assert "on the answers of 32 rows" in card


def test_the_first_loss_is_the_mean_over_answers(base, tmp_path):
    """Prompts and padding count for nothing; worked out row by row from plain forward passes."""
    report = tune(base, tmp_path / "out", batch=32, micro_batch=8, steps=1)
    tokenizer = load_tokenizer(base)
    answers = load_answers(rows(), tokenizer, TextSettings())
    model = AutoModelForCausalLM.from_pretrained(base).eval()
    total = count = 0.0
    for row in answers.rows:
        ids = torch.tensor([row.tokens])
        with torch.no_grad():
            scores = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
        learnt = torch.tensor(list(row.learnt[1:]), dtype=torch.bool)
        total -= float(scores.gather(1, ids[0, 1:, None])[:, 0][learnt].sum())
        count += int(learnt.sum())
    assert report.first_loss == pytest.approx(total / count, rel=1e-5)


def test_noise_between_steps_is_not_reported_as_learning(base, tmp_path):
    """Rows of very unlike loss, and a learning rate that changes nothing."""
    report = tune(base, tmp_path / "out", batch=4, steps=None, epochs=3, learning_rate=1e-12)
    losses = [point.loss for point in report.curve]
    assert max(losses) - min(losses) > 0.1
    assert report.last_loss == pytest.approx(report.first_loss, abs=0.02)


def test_packed_rows_do_not_see_each_other(base, tmp_path):
    whole = tune(base, tmp_path / "a", batch=32, micro_batch=32, steps=1)
    packed = tune(base, tmp_path / "b", batch=16, steps=1, packing=True, max_length=64)
    assert packed.first_loss == pytest.approx(whole.first_loss, rel=1e-5)


def test_only_routers_leaves_everything_else_bit_for_bit(base, tmp_path):
    report = tune(base, tmp_path / "out", only="routers")
    routers = {f"model.layers.{n}.mlp.gate.weight" for n in range(2)}
    assert changed_tensors(base, tmp_path / "out") == routers
    assert report.parameters == 2 * zoo.EXPERTS * zoo.HIDDEN


def test_the_balancing_loss_is_off_unless_asked_for(base, tmp_path):
    plain = tune(base, tmp_path / "a", steps=1)
    balanced = tune(base, tmp_path / "b", steps=1, aux_loss=0.5)
    assert balanced.first_loss > plain.first_loss + 0.1


@pytest.mark.parametrize(
    ("family", "fused"),
    [
        ("olmoe", True),
        pytest.param("qwen3_moe", False, marks=pytest.mark.slow),
        pytest.param("gpt_oss", False, marks=pytest.mark.slow),
    ],
)
def test_every_layout_comes_back(family, fused, zoo_folder, tmp_path):
    """In bfloat16 and in shards; the trained model runs as it is told on disk."""
    built = zoo_folder(family, fused=fused, dtype=torch.bfloat16, shard_size="60KB")
    base = make_base(built, tmp_path / "base")
    report = tune(base, tmp_path / "out", steps=6)
    names = changed_tensors(base, tmp_path / "out")
    assert any("experts" in name for name in names)
    assert any("gate.weight" in name or "router.weight" in name for name in names)
    files = {p.name for p in base.glob("*.safetensors*")}
    assert len(files) > 2
    assert {p.name for p in (tmp_path / "out").glob("*.safetensors*")} == files
    after = tune(tmp_path / "out", tmp_path / "again", steps=1, learning_rate=1e-9)
    assert after.first_loss == pytest.approx(report.curve[-1].loss, rel=0.3)
    assert after.first_loss < 0.9 * report.first_loss


def test_steps_too_small_for_what_is_stored_add_up(zoo_folder, tmp_path):
    """The optimiser's steps are the learning rate at most, and bfloat16 has eight bits: 1e-4 added
    to more than 2^-4 is lost, unless the sum is kept in more bits and rounded once."""
    built = zoo_folder("olmoe", num_hidden_layers=2, dtype=torch.bfloat16)
    base = make_base(built, tmp_path / "base")
    how = {"schedule": "constant", "warmup": 0.0, "learning_rate": 1e-4}
    tune(base, tmp_path / "out", steps=8, **how)
    name = "model.layers.0.self_attn.q_proj.weight"
    before, after = (zoo.tensors(tmp_path / folder)[name] for folder in ("base", "out"))
    large = before.abs() >= 2**-4
    moved = (before != after)[large].float().mean()
    assert large.sum() > 10
    assert moved > 0.2


def test_the_optimiser_is_adam_without_weight_decay(base, tmp_path):
    """Adam's first step is the learning rate for every weight that has a gradient."""
    tune(base, tmp_path / "out", steps=1, warmup=0.0, learning_rate=1e-3)
    name = "model.layers.0.self_attn.q_proj.weight"
    before, after = (zoo.tensors(tmp_path / folder)[name] for folder in ("base", "out"))
    step = (after - before).abs()
    assert float(step.max()) < 1.001e-3
    assert float((step > 0.99e-3).float().mean()) > 0.9


def test_tuning_a_merge_keeps_what_the_merge_said(base, tmp_path):
    other = zoo.perturb(base, tmp_path / "other", seed=1)
    (tmp_path / "linear.yml").write_text(json.dumps(zoo.linear([base, other])))
    moemerge.merge(tmp_path / "linear.yml", tmp_path / "merged")
    tune(tmp_path / "merged", tmp_path / "out", steps=1)
    document = json.loads((tmp_path / "out/moemerge_report.json").read_text())
    assert document["merge"]["method"] == "linear"
    assert document["tuning"]["model"] == str(tmp_path / "merged")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes(base, tmp_path):
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        tune(base, tmp_path / out, seed=seed, steps=2)
    assert changed_tensors(tmp_path / "a", tmp_path / "b") == set()
    assert changed_tensors(tmp_path / "a", tmp_path / "c")


@pytest.mark.slow
def test_two_processes_train_as_one_does(base, tmp_path):
    """The mean over all answers of a step, whichever process has them; rank 0 writes alone."""
    file = zoo.write_rows(tmp_path / "rows.jsonl", rows())
    how = {"batch": 32, "micro_batch": 16, "steps": 3, "learning_rate": 1e-3, "device": "cpu"}
    two = job("tune", base, tmp_path / "two", data=[str(file)], report=tmp_path / "report", **how)
    (code, words), (other, others) = together({2: [two]})
    assert (code, other) == (0, 0), words + others
    report = json.loads((tmp_path / "report.0").read_text())
    one = tune(base, tmp_path / "one", **how)
    losses = [point["loss"] for point in report["curve"]]
    assert losses == pytest.approx([point.loss for point in one.curve], rel=1e-3)
    assert report["processes"] == 2
    a, b, before = (zoo.tensors(tmp_path / name) for name in ("one", "two", "base"))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (a[name] - b[name]).norm() < 0.05 * (a[name] - before[name]).norm()
    assert not list(tmp_path.glob(".*"))


def test_rows_that_cannot_be_shared_alike_are_refused(base, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(UsageError, match="3 processes cannot share evenly"):
        tune(base, tmp_path / "out")


# One of each kind of layout: one by one, stacks, transposed, interleaved, flat, renamed, joined.
FAMILIES = [
    "olmoe",
    "mixtral",
    "gpt_oss",
    "granitemoe",
    "dbrx",
    "jetmoe",
    "deepseek_v3",
    "llama4_text",
    "nemotron_h",
    "deepseek_v4",
    "flint",
]


@pytest.mark.parametrize(
    ("family", "fused"), [*((family, False) for family in FAMILIES), ("olmoe", True)]
)
def test_what_moves_in_memory_moves_on_disk(family, fused, zoo_folder):
    """All parameters plus one in memory are all stored tensors plus one."""
    if not zoo.installed(family):
        pytest.skip(f"{family} is not in this transformers")
    opened = open_model("x", zoo_folder(family, fused=fused))
    layout = TrainedLayout(opened, None)
    model = load_trainable(opened, layout, torch.float32, lora=False)
    state = {n: v + 1 if v.is_floating_point() else v for n, v in model.state_dict().items()}
    written = dict(layout.written(state))
    for name, value in written.items():
        torch.testing.assert_close(value, opened.checkpoint.read(name) + 1)
    role = opened.architecture.role
    assert Role.SELECTION_BIAS not in {role(name) for name in written}  # they stay
    roles = {role(n) for n in opened.checkpoint.tensors if n not in written}
    assert roles <= {Role.SELECTION_BIAS, Role.ROUTER, Role.ATTENTION, Role.OTHER}
    assert len(written) > 0.9 * len(opened.checkpoint.tensors)
