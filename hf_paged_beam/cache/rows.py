"""Which row of the model is which beam of which prompt.

The model runs one row per beam, prompt after prompt. Where prompts have beams of different number, or some have left,
what looks at all beams of a prompt at once looks at a grid, as wide as the widest:

    3, 1 and 2 beams       rows    0 1 2 3 4 5        grid    0 1 2
                           prompt  0 0 0 1 2 2                3 . .
                           beam    0 1 2 0 0 1                4 5 .

A dot is a spare cell; it repeats what its prompt's first beam holds, so that nothing in it is out of range. Where all
prompts have as many beams, there is none, and rows and grid are two views of one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class BeamRows:
    """The rows of one step.

    Args:
        widths: beams of each prompt; 0 for one that takes no part.
        width: cells of each prompt in the grid, at least as many as it has beams.
        device: where rows are chosen.

    Attributes:
        widths: as given.
        batch_size: `B`, prompts.
        count: `R`, rows.
        width: `W`, as given.
        even: whether every cell is a row.
        prompt: ``[R]`` int64, prompt of each row.
        first: ``[B, 1]`` int64, row of each prompt's first beam.
        spare: ``[B, W]`` bool, cells that are no row; None where every cell is one.
    """

    def __init__(self, widths: Sequence[int], width: int, device: torch.device):
        self.widths, self.width = tuple(widths), width
        self.batch_size, self.count = len(widths), sum(widths)
        self.even = all(given == width for given in widths)
        if self.even:
            self.prompt = torch.arange(len(widths), device=device).repeat_interleave(width)
            self.first = torch.arange(0, self.count, width, device=device).unsqueeze(1)
            self.spare = None
            return
        beams = torch.tensor(self.widths, device=device)
        first = beams.cumsum(0) - beams
        self.prompt = torch.arange(len(widths), device=device).repeat_interleave(beams, output_size=self.count)
        self.first = first.unsqueeze(1).clamp(max=max(self.count - 1, 0))
        places = torch.arange(width, device=device)
        self.spare = places >= beams.unsqueeze(1)
        self._row_of_cell = (self.first + places.masked_fill(self.spare, 0)).flatten()
        self._cell_of_row = torch.arange(self.count, device=device) - first[self.prompt] + self.prompt * width

    def __repr__(self) -> str:
        return f"BeamRows(widths={self.widths}, width={self.width})"

    def cells(self, rows: torch.Tensor) -> torch.Tensor:
        """``[R, ...]`` to ``[B·W, ...]``, the grid laid flat."""
        return rows if self.even else rows.index_select(0, self._row_of_cell.to(rows.device))

    def rows_of_cells(self, cells: torch.Tensor) -> torch.Tensor:
        """``[B·W, ...]`` to ``[R, ...]``."""
        return cells if self.even else cells.index_select(0, self._cell_of_row.to(cells.device))

    def grid(self, rows: torch.Tensor) -> torch.Tensor:
        """``[R, ...]`` to ``[B, W, ...]``."""
        return self.cells(rows).view(self.batch_size, self.width, *rows.shape[1:])

    def rows(self, grid: torch.Tensor) -> torch.Tensor:
        """``[B, W, ...]`` to ``[R, ...]``."""
        return self.rows_of_cells(grid.flatten(0, 1))

    def repeat(self, per_prompt: torch.Tensor, dim: int = 0) -> torch.Tensor:
        """What each prompt has in dimension `dim`, for each of its rows: ``B`` to ``R``; a view for one prompt."""
        if not self.even:
            return per_prompt.index_select(dim, self.prompt.to(per_prompt.device))
        wide = per_prompt.unsqueeze(dim + 1)
        return wide.expand(*wide.shape[: dim + 1], self.width, *wide.shape[dim + 2 :]).flatten(dim, dim + 1)

    def first_of_each(self, rows: torch.Tensor) -> torch.Tensor:
        """``[R, ...]`` to ``[B, ...]``: the row of each prompt's first beam."""
        return rows[:: self.width] if self.even else rows.index_select(0, self.first.squeeze(1).to(rows.device))

    def rows_of(self, prompts: Sequence[int]) -> torch.Tensor:
        """``[rows]`` int64: the rows of some prompts, in their order."""
        of_prompt = torch.arange(self.count, device=self.prompt.device).split(self.widths)
        return torch.cat([of_prompt[prompt] for prompt in prompts])

    def parent_rows(self, parents: torch.Tensor) -> torch.Tensor:
        """The row that each row of the next step continues, ``[R]`` int64.

        Args:
            parents: ``[B, W]`` int64, beam of its prompt that each beam continues. A spare one, as where a prompt is
                done, stands for the first.
        """
        return self.rows(self.row_of(parents))

    def row_of(self, beams: torch.Tensor) -> torch.Tensor:
        """The row of each beam, ``[B, n]`` int64 to ``[B, n]``. A spare one stands for its prompt's first."""
        if self.even:
            return beams + self.first
        cells = torch.arange(0, self.batch_size * self.width, self.width, device=beams.device).unsqueeze(1) + beams
        return self._row_of_cell[cells]
