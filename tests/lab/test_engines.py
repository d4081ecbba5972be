"""The embedded engine against the simplest twin: the whole text through the model, each step."""

import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import quantised_zoo as qz
from moemerge.config.faults import parse_settings
from moemerge.config.text_settings import GenerationSettings
from moemerge.errors import CheckpointError, NumericalError, ResourceError
from moemerge.lab import engines
from moemerge.lab.engines import CompletionRequest, Finish, TransformersEngine, end_tokens

PROMPTS = [(5, 9, 30), (7,), (100, 3, 4, 80, 6, 11, 12), (5, 9, 31), (60, 61)]


def settings(**values):
    values = {"max_new_tokens": 12, "device": "cpu", "dtype": "float32", **values}
    return parse_settings(GenerationSettings, values, "settings")


def wanted(samples=1):
    return [
        CompletionRequest(p, s, tokens) for p, tokens in enumerate(PROMPTS) for s in range(samples)
    ]


def generated(folder, tokenizer, given, asked):
    engine = TransformersEngine(folder, tokenizer, given)
    answers = {(c.prompt, c.sample): c for c in engine.generate(asked)}
    assert len(answers) == len(asked)
    assert all(c.finish in (Finish.STOP, Finish.LENGTH) for c in answers.values())
    return {key: [int(word) for word in c.text.split()] for key, c in answers.items()}


@torch.inference_mode()
def twin(model, ends, given, w):
    """Token by token, without any cache or batch."""
    written, numbers = [], np.random.default_rng(w.stream(given.seed))
    while len(written) < given.max_new_tokens:
        logits = model(torch.tensor([[*w.tokens, *written]]), use_cache=False).logits[0, -1]
        token = int(logits.argmax())
        if given.temperature:
            token = drawn((logits / given.temperature).double(), given, numbers.random())
        if token in ends:
            break
        written.append(token)
    return written


def drawn(scores, given, number):
    """Keep the top k, then the fewest tokens that hold top p, and pick one by the sums."""
    order = scores.sort(descending=True).indices.tolist()[: given.top_k or None]
    kept, held = [], 0.0
    shares = scores[order].softmax(0).tolist()
    for token, share in zip(order, shares, strict=True):
        kept.append((token, share))
        held += share
        if held >= given.top_p:
            break
    place = number * held
    for token, share in sorted(kept):
        place -= share
        if place < 0:
            return token
    return max(kept, key=lambda one: one[1])[0]


def test_a_quantised_model_writes_what_its_dequantised_copy_does(with_tokenizer, numbers, tmp_path):
    plain = with_tokenizer("qwen3_moe", dtype=torch.bfloat16)
    folder = qz.KINDS["qwen fp8"].publish(plain, tmp_path / "fp8")
    copy = qz.plain_copy(folder, tmp_path / "plain")
    answers = [generated(f, numbers, settings(), wanted()) for f in (folder, copy)]
    assert answers[0] == answers[1]
    assert any(answers[0].values())


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "deepseek_v3", "gpt_oss", "mixtral"])
@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "top_k": 50, "top_p": 0.95}])
def test_completions_are_those_of_the_whole_text(with_tokenizer, numbers, family, how):
    folder, given = with_tokenizer(family), settings(**how)
    samples = 2 if how else 1
    answers = generated(folder, numbers, given, wanted(samples))
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    ends = end_tokens(model, numbers, folder)
    for w in wanted(samples):
        assert answers[w.prompt, w.sample] == twin(model, ends, given, w), (w.prompt, w.sample)


def test_log_likelihoods_are_those_of_the_model(with_tokenizer, numbers):
    folder = with_tokenizer("olmoe")
    pairs = [((5, 9), ()), ((5, 9), (30, 7)), ((8,), (100, 3, 4))]
    engine = TransformersEngine(folder, numbers, settings())
    model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    for (before, after), (found, greedy) in zip(pairs, engine.log_likelihoods(pairs), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*before, *after]])).logits[0].log_softmax(-1)
        scores = [logits[len(before) - 1 + at, word].item() for at, word in enumerate(after)]
        assert found == pytest.approx(sum(scores), abs=1e-4)
        best = [int(logits[len(before) - 1 + at].argmax()) for at in range(len(after))]
        assert greedy == (best == list(after))


def test_a_generation_config_that_is_no_file_is_refused(with_tokenizer, numbers, tmp_path):
    folder = shutil.copytree(with_tokenizer("olmoe"), tmp_path / "model")
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "generation_config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        generated(folder, numbers, settings(), wanted())


def test_neighbours_order_and_the_size_of_a_batch_change_nothing(with_tokenizer, numbers):
    folder = with_tokenizer("olmoe")
    given = settings(temperature=1.0)
    whole = generated(folder, numbers, given, wanted(4))
    assert len(set(map(tuple, whole.values()))) > 10  # samples differ
    some = [w for w in reversed(wanted(4)) if (w.prompt + w.sample) % 3]
    for size in (1, 3):
        answers = generated(folder, numbers, settings(temperature=1.0, batch_size=size), some)
        assert answers == {key: whole[key] for key in answers}
    other = generated(folder, numbers, settings(temperature=1.0, seed=1), wanted(4))
    assert other != whole


def test_stop_texts_end_a_completion_and_are_cut_off(with_tokenizer, numbers):
    folder = with_tokenizer("olmoe")
    whole = TransformersEngine(folder, numbers, settings(max_new_tokens=40))
    text = next(iter(whole.generate([wanted()[0]]))).text
    words = text.split()
    stop = f" {words[10]} {words[11]}"
    before = text[: text.index(stop)]
    given = settings(max_new_tokens=40, stop=[stop, "never"])
    engine = TransformersEngine(folder, numbers, given)
    done = next(iter(engine.generate([wanted()[0]])))
    assert done.text == before
    assert done.finish is Finish.STOP
    assert done.tokens < 40


def test_a_prompt_that_fills_the_context_fails_alone(with_tokenizer, numbers):
    engine = TransformersEngine(with_tokenizer("olmoe"), numbers, settings())
    asked = [
        CompletionRequest(0, 0, (5,) * 256),
        CompletionRequest(1, 0, (5,) * 250),
        CompletionRequest(2, 0, (5, 6)),
    ]
    answers = {c.prompt: c for c in engine.generate(asked)}
    assert answers[0].has_failed
    assert "256 tokens, the model reads 256" in answers[0].detail
    assert answers[1].finish is Finish.LENGTH
    assert answers[1].tokens == 6
    assert answers[2].finish is Finish.STOP


def test_what_does_not_fit_is_refused_with_an_estimate(with_tokenizer, numbers, monkeypatch):
    folder = with_tokenizer("olmoe")
    monkeypatch.setattr(engines, "available_memory", lambda device: 1000)
    with pytest.raises(ResourceError, match=r"(?s)needs .* for its weights.*engine=.server"):
        TransformersEngine(folder, numbers, settings())
    engine = None
    monkeypatch.undo()
    engine = TransformersEngine(folder, numbers, settings())
    monkeypatch.setattr(engines, "available_memory", lambda device: 1000)
    with pytest.raises(ResourceError, match="one completion of 19 tokens needs"):
        list(engine.generate(wanted()))


def test_a_model_whose_logits_are_nan_is_refused(with_tokenizer, numbers):
    folder = with_tokenizer("olmoe")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(NumericalError, match="its logits are NaN"):
        TransformersEngine(folder, numbers, settings())
