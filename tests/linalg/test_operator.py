from __future__ import annotations

import torch

from moemerge.linalg import Diagonal, Identity

CPU = torch.device("cpu")


def test_identity_is_the_identity_matrix() -> None:
    operator = Identity((2, 3), CPU)
    assert torch.equal(operator.as_matrix(), torch.eye(6, dtype=torch.float64))
    assert torch.equal(operator.diagonal(), torch.ones(2, 3, dtype=torch.float64))


def test_diagonal_matrix_is_row_major() -> None:
    values = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    assert torch.equal(Diagonal(values).as_matrix(), torch.diag(torch.arange(1.0, 7.0)).double())


def test_diagonal_inverse_leaves_empty_entries_alone() -> None:
    inverse = Diagonal(torch.tensor([[4.0, 0.0], [0.5, 1e-30]])).inverse()
    expected = torch.tensor([[0.25, 1.0], [2.0, 1e30]], dtype=torch.float64)
    torch.testing.assert_close(inverse.diagonal(), expected, rtol=1e-6, atol=0.0)
