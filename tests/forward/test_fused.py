"""What is computed in a faster way on a GPU: only where it is the same thing."""

import pytest
import torch
from transformers.integrations import moe

from forward import reference
from moemerge.checkpoint.reader import Checkpoint
from moemerge.forward import compat, fused
from moemerge.forward.fused import SUFFIX, is_plain_norm, use_fused_norms
from moemerge.forward.loading import build_skeleton
from moemerge.forward.settings import StreamSettings
from moemerge.forward.stream import ModelStream

CPU = torch.device("cpu")
BF16 = torch.bfloat16


def norms(folder):
    model = build_skeleton(Checkpoint.open(folder), BF16)
    seen = set()
    for module in model.modules():
        if type(module).__name__.endswith(SUFFIX) and type(module) not in seen:
            seen.add(type(module))
            yield module


@pytest.mark.parametrize(
    ("family", "plain"),
    [("olmoe", True), ("qwen3_moe", True), ("mixtral", True), ("qwen3_next", False)],
)
def test_only_plain_norms_are_taken_for_plain(family, plain, zoo_folder):
    found = [is_plain_norm(module, CPU, BF16) for module in norms(zoo_folder(family))]
    assert found
    assert all(found) == plain  # qwen3_next scales by 1 + weight, and gates one of its norms


def test_a_norm_that_adds_its_epsilon_elsewhere_is_not_plain():
    class LateRMSNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(64))
            self.eps = 1e-5

        def forward(self, x):
            wide = x.float()
            return self.weight * (wide / (wide.square().mean(-1, True).sqrt() + self.eps)).to(BF16)

    assert not is_plain_norm(LateRMSNorm(), CPU, BF16)


def test_on_a_cpu_nothing_is_switched(zoo_folder):
    model = build_skeleton(Checkpoint.open(zoo_folder("olmoe")), BF16)
    assert use_fused_norms(model, CPU, BF16) == 0
    assert not fused.use_fused_experts(model, CPU, BF16)
    assert model.config._experts_implementation == compat.GROUPED


def experts_of(folder):
    model = build_skeleton(Checkpoint.open(folder), BF16)
    return next(m for m in model.modules() if hasattr(m, "_apply_gate"))


@pytest.mark.parametrize(
    ("family", "suited"), [("olmoe", True), ("qwen3_moe", True), ("gpt_oss", False)]
)
def test_which_experts_are_known(family, suited, zoo_folder):
    experts = experts_of(zoo_folder(family))
    x = torch.zeros(3, 32, dtype=BF16)
    chosen, weights = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    assert fused._suited(experts, x, chosen, weights) == suited
    assert not fused._suited(experts, x.float(), chosen, weights)
    assert not fused._suited(experts, x, chosen[None], weights[None])


def test_what_learns_is_left_to_transformers(zoo_folder):
    experts = experts_of(zoo_folder("olmoe"))
    x, chosen = torch.zeros(3, 32, dtype=BF16), torch.zeros(3, 2, dtype=torch.int64)
    for weights in (torch.ones(3, 2), torch.ones(3, 2, requires_grad=True)):
        assert fused._suited(experts, x, chosen, weights) != weights.requires_grad
    experts.down_proj.requires_grad_(True)
    assert not fused._suited(experts, x, chosen, torch.ones(3, 2))
    with torch.no_grad():
        assert fused._suited(experts, x, chosen, torch.ones(3, 2))


def test_experts_in_their_stored_dtype_compute_the_same(zoo_folder, monkeypatch):
    monkeypatch.setattr(fused, "CONVERTED_BYTES", 4 * 32 * 5)  # five rows
    folder, batches = zoo_folder("olmoe", dtype=BF16), reference.batches()
    found = []
    for narrow in (False, True):
        settings = StreamSettings(CPU, torch.float32, narrow_experts=narrow)
        with ModelStream(Checkpoint.open(folder), batches, settings) as stream:
            for stop in reference.routers(stream):
                experts = stream.model.model.layers[stop.layer].mlp.experts
                assert (experts.down_proj.dtype == BF16) == narrow
                found.append([a.given[0].clone() for a in stop.arrivals])
    layers = len(found) // 2
    for wide, small in zip(found[:layers], found[layers:], strict=True):
        for x, y in zip(wide, small, strict=True):
            torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-6)
    assert layers > 1


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("weights", [torch.float32, BF16])
@pytest.mark.parametrize(("tokens", "top_k", "experts", "d", "w"), [
    (1, 1, 2, 64, 16), (37, 4, 8, 96, 48), (1000, 8, 64, 512, 256), (513, 2, 128, 2048, 768),
])  # fmt: skip
def test_fused_experts_are_the_plain_ones(weights, tokens, top_k, experts, d, w):
    from moemerge.kernels.experts import experts as fused

    class Plain:
        num_experts, has_gate, has_bias, is_transposed = experts, True, False, False
        has_post_expert_norm = _is_expert_parallel = False
        act_fn = staticmethod(torch.nn.functional.silu)
        _apply_gate = moe._default_apply_gate

    torch.manual_seed(tokens)
    plain = Plain()
    plain.gate_up_proj = (torch.randn(experts, 2 * w, d, device="cuda") * d**-0.5).to(BF16)
    plain.down_proj = (torch.randn(experts, d, w, device="cuda") * w**-0.5).to(BF16)
    x = torch.randn(tokens, d, device="cuda").to(BF16)
    shares, chosen = torch.randn(tokens, experts, device="cuda").softmax(-1).topk(top_k)
    shares = shares.to(weights)
    wanted = moe.grouped_mm_experts_forward(plain, x, chosen, shares)
    found = fused(x, chosen, shares, plain.gate_up_proj, plain.down_proj)
    assert found.dtype == wanted.dtype
    assert (found - wanted).float().norm() <= 1e-3 * wanted.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"])
def test_bfloat16_features_are_as_near_as_the_whole_models(family, zoo_folder):
    folder = zoo_folder(family, dtype=BF16)
    batches = reference.batches()
    found = {}
    with ModelStream(
        Checkpoint.open(folder), batches, StreamSettings(torch.device("cuda"), BF16)
    ) as stream:
        for stop in reference.routers(stream):
            found[stop.path] = reference.inputs_of(stop)
    exact, plain = (
        reference.run_whole(reference.whole_model(folder, dtype).to("cuda"), [*found], batches)[0]
        for dtype in (torch.float32, BF16)
    )
    assert list(found) == list(plain)
    lengths = [int(n) for batch in batches for n in batch.mask.sum(dim=1)]
    for path in plain:
        want, ours, theirs = (torch.cat(side[path]).float() for side in (exact, found, plain))
        off, usual = ((side - want).norm(dim=1) for side in (ours, theirs))
        assert off.median() <= 1.5 * usual.median(), path
        # A token at a near tie may meet other experts; all that attends to it is then far off.
        far = 3 * usual.median()
        rerouted, as_usual = (
            sum(bool((row > far).any()) for row in side.split(lengths)) for side in (off, usual)
        )
        assert rerouted <= as_usual + 1, path
