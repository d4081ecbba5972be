from __future__ import annotations

import torch


def test_by_hand(merge):
    # distances 0, 0.5, 1, 4 at t = 1: shares 1, 1, 1, 1/4
    out = merge("nearswap", [[1.0, 1.5, 0.0, 5.0]], base=[1.0, 1.0, 1.0, 1.0], t=1.0)
    torch.testing.assert_close(out, torch.tensor([1.0, 1.5, 0.0, 2.0]))


def test_ends(merge):
    base, other = torch.randn(50), torch.randn(50)
    assert torch.equal(merge("nearswap", [other], base=base, t=0.0), base)
    assert torch.equal(merge("nearswap", [other], base=base, t=-1.0), base)
    assert torch.equal(merge("nearswap", [other], base=base, t=100.0), other)
