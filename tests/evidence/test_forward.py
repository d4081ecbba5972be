"""The batched forward pass equals that of transformers, for several models at once."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from evidence.data import PRESETS
from evidence.forward import hidden_states, logits, prepare, rotation
from evidence.layout import ARCHITECTURES, initial, shape_of_config, to_tensors
from evidence.scoring import generate, generate_many, load_flat
from evidence.training import write_model
from moemerge.checkpoint import Checkpoint
from moemerge.errors import ArchitectureError
from moemerge.lab.testbed.tasks import problems

LENGTH = 12


@pytest.fixture(scope="module", params=ARCHITECTURES)
def models(request, tmp_path_factory):
    """Two models with unit gain, so that routing and attention are far from uniform."""
    shape = PRESETS["tiny"].shape(request.param)
    generator = torch.Generator().manual_seed(3)
    flats = torch.stack([initial(shape, seed) for seed in (1, 2)])
    for name, piece in shape.views(flats).items():
        if "norm" in name:
            piece.add_(0.2 * torch.randn(piece.shape, generator=generator))
        else:
            piece.mul_(6)
    folder = tmp_path_factory.mktemp(request.param)
    for number, flat in enumerate(flats):
        write_model(folder / str(number), flat, shape, torch.float32)
    return shape, flats, [folder / "0", folder / "1"]


def ours(shape, flats, tokens, **options):
    weights = prepare(flats, shape)
    length = tokens.shape[-1]
    hidden, routings = hidden_states(
        weights,
        tokens,
        shape,
        rotation(torch.arange(length), shape),
        **options,
    )
    return logits(weights, hidden), routings


def theirs(folder, tokens):
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        return model(tokens, output_router_logits=True)


def test_logits_and_routing_equal_those_of_transformers(models):
    shape, flats, folders = models
    tokens = torch.randint(3, 80, (2, 3, LENGTH), generator=torch.Generator().manual_seed(0))
    found, routings = ours(shape, flats, tokens)
    for number, folder in enumerate(folders):
        expected = theirs(folder, tokens[number])
        torch.testing.assert_close(
            found[number].view(3, LENGTH, -1), expected.logits, rtol=1e-4, atol=1e-4
        )
        for routing, wanted in zip(routings, expected.router_logits, strict=True):
            torch.testing.assert_close(
                routing.probabilities[number], wanted.softmax(-1), rtol=1e-3, atol=1e-5
            )
            best = wanted.topk(shape.top_k, dim=-1).indices
            assert routing.chosen[number].gather(-1, best).all()
            assert (routing.chosen[number].sum(-1) == shape.top_k).all()


def test_balance_is_the_loss_of_transformers_layer_by_layer(models):
    shape, flats, folders = models
    tokens = torch.randint(3, 80, (1, 2, LENGTH), generator=torch.Generator().manual_seed(1))
    _, routings = ours(shape, flats[:1], tokens)
    counted = torch.ones(1, 2, LENGTH)
    counted[:, 1, 5:] = 0  # as if these were padding
    from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

    expected = theirs(folders[0], tokens[0])
    for routing, wanted in zip(routings, expected.router_logits, strict=True):
        loss = load_balancing_loss_func((wanted,), shape.experts, shape.top_k, counted[0])
        found = routing.balance(counted.flatten(1)[..., None])
        torch.testing.assert_close(found[0], loss, rtol=1e-4, atol=1e-5)


def test_working_on_some_places_changes_nothing_there(models):
    shape, flats, _ = models
    tokens = torch.randint(3, 80, (1, 3, LENGTH), generator=torch.Generator().manual_seed(2))
    real = torch.ones(3, LENGTH, dtype=torch.bool)
    real[0, 7:] = real[2, 3:] = False
    places = real.flatten().nonzero()[:, 0]
    whole, _ = ours(shape, flats[:1], tokens)
    some, _ = ours(shape, flats[:1], tokens, places=places)
    torch.testing.assert_close(some, whole[:, places], rtol=1e-4, atol=1e-5)


def test_greedy_text_is_that_of_transformers(models):
    _, _, folders = models
    prompts = [p.prompt for p in problems("code", split="test", count=6, seed=0)]
    found = generate(folders[0], prompts, device="cpu", max_new_tokens=8)
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    model = AutoModelForCausalLM.from_pretrained(folders[0])
    for prompt, text in zip(prompts, found, strict=True):
        asked = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        # Special tokens but the end may be written by a random model; they have no text.
        written = model.generate(**asked, max_new_tokens=8, do_sample=False)[0]
        written = written[asked["input_ids"].shape[1] :].tolist()
        end = written.index(1) if 1 in written else len(written)
        words = tokenizer.convert_ids_to_tokens(written[:end])
        assert text == "".join(word for word in words if len(word) == 1)
    assert generate_many(folders, prompts, device="cpu", max_new_tokens=8)[0] == found


def test_a_checkpoint_comes_back_as_it_was(models):
    shape, flats, folders = models
    flat, found = load_flat(folders[1])
    assert found == shape
    assert torch.equal(flat, flats[1])
    with Checkpoint.open(folders[1]) as checkpoint:
        assert set(checkpoint) == set(to_tensors(flat, shape))


def test_other_models_are_refused(zoo_folder):
    with pytest.raises(ArchitectureError, match="mixtral"):
        load_flat(zoo_folder("mixtral"))
    with pytest.raises(ArchitectureError, match="hidden_size"):
        shape_of_config({"model_type": "olmoe"}, "here")
    with pytest.raises(ArchitectureError, match="only models of"):
        load_flat(zoo_folder("olmoe", tie_word_embeddings=True))
