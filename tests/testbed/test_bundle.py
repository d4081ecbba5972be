"""The specialists that come with the package are what their manifest says."""

from __future__ import annotations

from transformers import AutoModelForCausalLM, AutoTokenizer

from evidence.scoring import accuracy_many
from evidence.training import TEST_PROBLEMS, TEST_SEED
from moemerge.testbed import bundled_set
from moemerge.testbed.tasks import problems

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
