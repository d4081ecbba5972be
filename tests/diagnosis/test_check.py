"""Check text: the loss before and after a repair, and sources that have memorised their text."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

import moemerge
import zoo
from collecting.cases import token_rows
from forward.reference import row_losses
from moemerge.cli.repair_tables import calibrate_report
from moemerge.cli.routing_table import diagnosis_report
from moemerge.diagnosis.run import has_memorised
from moemerge.forward.losses import MeanLoss
from repairs.calibration import cases
from terminal import printed


def mean_loss(folder, tokenizer, file):
    """The loss of the transformers model itself, one row at a time."""
    sums, tokens = zip(*row_losses(folder, token_rows(tokenizer, file)), strict=True)
    return sum(sums) / sum(tokens)


@pytest.fixture(scope="module")
def case(case_of):
    return case_of("olmoe", num_hidden_layers=2, rows=110)


def test_check_text_is_measured_before_and_after_and_changes_nothing(case, tmp_path):
    check = cases.write_text(tmp_path / "check.jsonl", seed=8, rows=9)
    general = cases.write_text(tmp_path / "general.jsonl", seed=9, rows=5)
    out = tmp_path / "out"
    report = case.calibrate(out, check={"math": check, "general": general})
    plain = case.calibrate(tmp_path / "plain")
    assert cases.weights(out) == cases.weights(tmp_path / "plain")
    assert report.diagnosis is not None
    assert plain.diagnosis is not None
    assert report.diagnosis["loss_after"] == pytest.approx(plain.diagnosis["loss_after"])
    found = report.diagnosis["check"]["math"]
    assert found["rows"] == found["documents"] == 9
    assert found["loss_before"] == pytest.approx(mean_loss(case.merged, case.merged, check))
    assert found["loss_after"] == pytest.approx(mean_loss(out, case.merged, check))
    source = mean_loss(case.sources["math"], case.merged, check)
    assert found["loss_source"] == pytest.approx(source)
    assert found["change"] == pytest.approx(found["loss_after"] - found["loss_before"])
    assert report.diagnosis["check"]["general"]["loss_source"] is None
    document = json.loads((out / "moemerge_report.json").read_text())["calibration"]
    assert document["diagnosis"] == report.diagnosis
    assert document["check"]["math"] == [str(check)]
    card = (out / "README.md").read_text()
    assert f"| math | {found['tokens']} | {found['loss_before']:.4g} |" in card
    assert "check general" in printed(calibrate_report(report, verbose=False))
    config = (out / "moemerge_config.yml").read_text()
    assert "check:" in config
    again = moemerge.run(out / "moemerge_config.yml", tmp_path / "again")
    assert again.repair is not None
    assert again.repair.diagnosis is not None
    assert again.repair.diagnosis["check"]["math"] == pytest.approx(found)


def test_check_text_is_measured_without_held_out_rows(case, tmp_path):
    check = cases.write_text(tmp_path / "check.jsonl", seed=8, rows=9)
    out = tmp_path / "out"
    report = case.calibrate(out, check={"math": check}, holdout=0.0)
    assert report.diagnosis is not None
    assert report.diagnosis["tokens"] == {}
    assert report.diagnosis["check"]["math"]["rows"] == 9
    text = printed(calibrate_report(report, verbose=False))
    assert "check math" in text
    assert "mismatch  (" not in text
    assert "Next-token loss on check text" in (out / "README.md").read_text()


def test_diagnose_compares_models_on_check_text(case, tmp_path):
    rows = [json.loads(line) for line in case.data["code"].read_text().splitlines()[:12]]
    check = zoo.write_rows(
        tmp_path / "check.jsonl", ({**row, "doc": n // 4} for n, row in enumerate(rows))
    )
    found = case.diagnose(
        sources={"math": case.sources["math"]},
        data={"math": [{**row, "doc": n} for n, row in enumerate(rows)]},
        check={"math": check},
        against=[case.sources["code"]],
        group="doc",
    )
    merged, other, source = found.check
    assert [merged.model, source.model] == ["model", "math"]
    assert (merged.documents, merged.rows) == (3, 12)
    assert merged.change is None
    assert other.change == pytest.approx(other.loss - merged.loss)
    assert found.total("math").loss == pytest.approx(merged.loss)
    assert found.to_json()["check"][0]["perplexity"] == pytest.approx(merged.perplexity)
    assert "--check" in found.command
    assert "source math" in printed(diagnosis_report(found, verbose=False))


def test_check_text_is_refused_early(case, tmp_path):
    with pytest.raises(moemerge.DataError, match="check 'math': no such file"):
        case.calibrate(tmp_path / "out", check={"math": tmp_path / "none.jsonl"})
    check = cases.write_text(tmp_path / "check.jsonl", seed=8)
    with pytest.raises(moemerge.UsageError, match="check text is given, but nothing is measured"):
        case.calibrate(tmp_path / "out", check={"math": check}, measure=False)
    assert not (tmp_path / "out").exists()


# --- memorised text -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "check", "memorised"),
    [
        (MeanLoss(0.30, 0.01), MeanLoss(0.06, 0.01), True),
        (MeanLoss(0.507, 0.03), MeanLoss(0.300, 0.026), True),  # measured: 25 epochs on 150 rows
        (MeanLoss(0.30, 0.01), MeanLoss(0.24, 0.01), False),  # most of the lead is there
        (MeanLoss(0.30, 0.01), MeanLoss(-0.10, 0.01), True),  # worse than the merge elsewhere
        (MeanLoss(0.30, 0.09), MeanLoss(0.06, 0.09), False),  # too few documents
        (MeanLoss(0.015, 0.001), MeanLoss(0.006, 0.001), False),  # too small to matter
        (MeanLoss(-0.10, 0.01), MeanLoss(-0.02, 0.01), False),
        (MeanLoss(0.30, None), MeanLoss(0.0, None), False),
    ],
)
def test_the_rule(own, check, memorised):
    assert has_memorised(own, check) is memorised


def trained(folder, out, tokenizer, file, steps):
    """The model after full-batch steps on a file's rows."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = token_rows(tokenizer, file)
    ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=-100)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(steps):
        optimiser.zero_grad()
        model(input_ids=ids.clamp_min(0), attention_mask=ids >= 0, labels=ids).loss.backward()
        optimiser.step()
    model.save_pretrained(out)
    return out


def test_a_source_that_was_trained_on_its_text_is_noticed(zoo_folder, tmp_path):
    base = zoo_folder("olmoe", num_hidden_layers=2)
    seen, unseen = (
        cases.write_text(tmp_path / f"{name}.jsonl", seed=seed, rows=20)
        for name, seed in (("seen", 1), ("unseen", 3))
    )
    tokenizer = cases.zoo.tiny_tokenizer(tmp_path / "tokenizer")
    math = trained(base, tmp_path / "math", tokenizer, seen, 40)
    code = cases.zoo.perturb(math, tmp_path / "code", seed=5, scale=1.0)
    merged = cases.average([math, code], tmp_path / "merged")
    cases.zoo.tiny_tokenizer(merged)

    def said(data, check):
        notes = zoo.Notes()
        found = moemerge.diagnose(
            merged, sources={"math": math}, data={"math": data}, check={"math": check},
            progress=notes,
        )  # fmt: skip
        told = [note for note in notes.said if "probably trained on the calibration text" in note]
        assert told == [notice for notice in found.notices if "probably trained" in notice]
        return told

    assert len(said(seen, unseen)) == 1
    more = cases.write_text(tmp_path / "more.jsonl", seed=5, rows=20)
    assert said(more, unseen) == []
    assert said(unseen, seen) == []
