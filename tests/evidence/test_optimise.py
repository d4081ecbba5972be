"""The optimiser is AdamW, plans have the right shares, and stacked models are independent."""

import pytest
import torch

from evidence.data import (
    CLIP,
    HARD_SHARE,
    LENGTH,
    PRESETS,
    base_mixture,
    plan,
    pool_of,
    specialist_mixture,
)
from evidence.layout import initial
from evidence.optimise import Course, State, _Step, schedule, train_stack
from moemerge.lab.testbed.tasks import DOMAINS

SHAPE = PRESETS["tiny"].shape("olmoe")


@pytest.fixture(scope="module")
def pool():
    return pool_of(200)


def course(pool, seed, **changes):
    rows = plan(pool, specialist_mixture("code"), steps=4, batch=6, seed=seed)
    return Course(**{
        "rows": rows, "lr": 1e-3, "router_lr": 2e-3, "balance": 0.1, "prompt_steps": 2, **changes,
    })  # fmt: skip


def run(pool, starts, courses):
    state = State.start(torch.stack(starts), 4)
    told = []
    train_stack(state, courses, pool, SHAPE, told.append)
    assert sum(told) == 4
    assert int(state.step) == 4
    return state


def test_models_of_a_stack_train_as_if_alone(pool):
    starts = [initial(SHAPE, 1), initial(SHAPE, 2)]
    courses = [course(pool, 5), course(pool, 6, lr=3e-4, balance=0.5, prompt_steps=0)]
    both = run(pool, starts, courses)
    for number in range(2):
        alone = run(pool, starts[number : number + 1], courses[number : number + 1])
        torch.testing.assert_close(both.losses[:, number], alone.losses[:, 0])
        # Adam divides by a gradient's size, so where that is nothing but rounding signs may differ.
        off = (both.flat[number] - alone.flat[0]).abs() > 1e-5
        assert off.float().mean() < 0.01


def test_a_step_is_that_of_torch(pool):
    """Weights and routers at their own rates, the gradient bounded, by torch's own AdamW."""
    start = initial(SHAPE, 1)
    one = course(pool, 5)
    state = State.start(start[None], 4)
    step = _Step(state, [one], pool, SHAPE)
    split = SHAPE.parameters - SHAPE.router_parameters
    weights = start[:split].clone().requires_grad_()
    routers = start[split:].clone().requires_grad_()
    groups = [{"params": [weights], "lr": 1e-3}, {"params": [routers], "lr": 2e-3}]
    theirs = torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0)
    for number, rate in enumerate(schedule(4)):
        flat = torch.cat([weights, routers]).detach()[None].requires_grad_()
        state.flat.copy_(flat.detach())  # both go on from the same weights
        loss, _ = step._loss(flat)
        gradient = torch.autograd.grad(loss, flat)[0][0]
        gradient = gradient * min(1.0, CLIP / float(gradient.norm()))
        weights.grad, routers.grad = gradient[:split], gradient[split:]
        for group, lr in zip(theirs.param_groups, (1e-3, 2e-3), strict=True):
            group["lr"] = lr * float(rate)
        theirs.step()
        step()
        found = torch.cat([weights, routers]).detach()
        torch.testing.assert_close(state.flat[0], found, rtol=1e-4, atol=1e-6)
        assert int(state.step) == number + 1


def test_what_is_learnt_are_answers_and_at_first_prompts(pool):
    state = State.start(initial(SHAPE, 1)[None], 4)
    step = _Step(state, [course(pool, 5, prompt_steps=1)], pool, SHAPE)
    rows = torch.tensor([[0, 100]])
    lengths, prompts = pool.lengths[rows][0], pool.prompts[rows][0]
    counted = step._counted(rows)[0]  # (2, LENGTH - 1)
    assert counted.shape == (2, LENGTH - 1)
    assert counted.sum(1).tolist() == (lengths - 1).tolist()  # all but the first token
    state.step.fill_(1)
    assert step._counted(rows)[0].sum(1).tolist() == (lengths - prompts).tolist()


def test_the_learning_rate_rises_then_falls():
    rates = schedule(1000)
    assert rates[0] == pytest.approx(0.01)
    assert rates[99] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.05)
    assert (rates[100:].diff() < 0).all()
    assert len(schedule(1)) == 1


def test_a_plan_keeps_the_shares(pool):
    rows = plan(pool, base_mixture(DOMAINS), steps=50, batch=200, seed=0)
    assert rows.shape == (50, 200)
    assert torch.equal(rows, plan(pool, base_mixture(DOMAINS), steps=50, batch=200, seed=0))
    counts = {
        name: ((rows >= own.start) & (rows < own.stop)).float().mean().item()
        for name, own in pool.kinds.items()
    }
    for name, share in base_mixture(DOMAINS).items():
        assert counts[name] == pytest.approx(share, abs=0.02)
    assert sum(base_mixture(DOMAINS).values()) == pytest.approx(1)
    hard = ["chain", "word-problem", "equation"]
    assert sum(base_mixture(DOMAINS)["math", name] for name in hard) == pytest.approx(
        HARD_SHARE / 3
    )


@pytest.mark.gpu
def test_a_recorded_step_trains_as_an_ordinary_one(pool):
    steps = 30
    rows = plan(pool, specialist_mixture("chat"), steps=steps, batch=32, seed=0)
    courses = [Course(rows, 1e-3, 1e-3, 0.02, 0)]
    ends = {}
    for device in ("cpu", "cuda"):
        state = State.start(initial(SHAPE, 1)[None].to(device), steps)
        train_stack(state, courses, pool, SHAPE, lambda _: None)
        ends[device] = state.losses[:, 0].cpu()
    torch.testing.assert_close(ends["cuda"], ends["cpu"], rtol=0.05, atol=0.02)
