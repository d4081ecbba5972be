"""A matrix in cells that have a scale each: blocks, rows, groups of a row, or all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moemerge.runtime.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Cells:
    """The cells of an (out, in) matrix; those at its far edges may be cut short."""

    rows: int  # of the matrix
    columns: int
    height: int  # of one cell
    width: int

    @property
    def down(self) -> int:
        """Cells in a column of cells."""
        return -(-self.rows // self.height)

    @property
    def across(self) -> int:
        return -(-self.columns // self.width)

    def rows_of(self, start: int, stop: int) -> tuple[int, int]:
        """The rows of cells that hold the matrix rows [start, stop)."""
        return start // self.height, -(-stop // self.height)

    def for_rows(self, grid: Tensor, start: int, stop: int) -> Tensor:
        """One row of numbers for every matrix row of [start, stop): (rows, across).

        `grid` are the rows of cells that `rows_of` names.
        """
        if self.height == 1:
            return grid
        index = torch.arange(start, stop).div_(self.height, rounding_mode="floor")
        return grid.index_select(0, index - start // self.height)

    def spread(self, numbers: Tensor) -> Tensor:
        """(rows, across) -> (rows, columns)."""
        wide = numbers[:, :, None].expand(-1, -1, self.width)
        return wide.reshape(len(numbers), -1)[:, : self.columns]

    def multiply_(self, values: Tensor, factors: Tensor) -> None:
        """values (rows, columns) times what each cell has in factors (rows, across)."""
        whole = self.columns // self.width
        if whole:
            part = values[:, : whole * self.width].view(-1, whole, self.width)
            part.mul_(factors[:, :whole, None])
        if whole < self.across:
            values[:, whole * self.width :].mul_(factors[:, whole:])

    def gather(self, values: Tensor) -> Tensor:
        """values (rows, columns), rows beginning with a cell, as (down, across, elements of a
        cell); what is cut short is filled up with zeros."""
        down = -(-len(values) // self.height)
        pad = (0, self.across * self.width - self.columns, 0, down * self.height - len(values))
        if any(pad):
            values = torch.nn.functional.pad(values, pad)
        blocks = values.view(down, self.height, self.across, self.width)
        return blocks.transpose(1, 2).reshape(down, self.across, -1)

    def scatter(self, cells: Tensor, rows: int) -> Tensor:
        """The inverse of `gather`, for a matrix of `rows` rows."""
        down = len(cells)
        blocks = cells.view(down, self.across, self.height, self.width).transpose(1, 2)
        return blocks.reshape(down * self.height, -1)[:rows, : self.columns]
