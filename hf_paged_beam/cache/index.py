"""Which slot of the pool holds which token of which beam.

A beam is a row of slot numbers. Its first `P` tokens, the prompt, stand in slots ``0..P-1`` of the prompt's pool and
need no table. What it generated is one row of `paths`:

    paths: [beam, generated position] -> slot, counted from the end of the prompt

    two beams after four steps:     slots of the prompt's pool (P = 4)
        beam 0: 0 2 4 1                 0 1 2 3 | 4 5 6 7 8 9
        beam 1: 0 2 4 3                 prompt  | 0 1 2 3 4 5   <- numbers in `paths`

Both beams share what they generated in their first three steps. Slot 5 holds a token that no beam's path names any
more: it is free, and will be reused. So was slot 1, and the fourth step reused it. Whether a slot is live is derived
from the table, not counted: a slot is live if some path names it.

What is read of a pool ends with the highest slot that a path names. A long path that stays while many others end can
stand in high slots with many free ones below; where more than `MOST_READ` times the live slots would be read, the live
ones from the end move into the lowest free ones:

    beam 0: 0 4 8     0 1 2 3 4 5 6 7 8        0 1 2 3        beam 0: 0 2 3
    beam 1: 0 4 1     o o . . o . . . o   ->   o o o o        beam 1: 0 2 1        slot 4 became 2, slot 8 became 3
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from .rows import BeamRows

MOST_READ = 1.25
"""Slots that are read over those that the largest tree, and its prompt, need. More than that, and slots move."""

_FREE = 1 << 32
"""Of what `fork` reports, the part above counts free slots, the part below is a slot."""


class BeamIndex:
    """The index table shared by all layers of a `PagedBeamCache`.

    Attributes:
        num_beams: `W`, beams per prompt; of the widest, where prompts differ.
        beams: which rows of a step are the beams of which prompt, `R` rows; none until the prompt is complete.
        prompt_length: `P`, tokens of the prompt (columns, padding included); 0 until the prompt is complete.
        decoding: whether the prompt is complete, so that each further token belongs to one beam alone.
        paths: ``[R, t]`` int64, tree slot of each generated position of each beam; empty during the prompt.
        tree_slots: slots in use beside the prompt's, known on the host: every number in `paths` is smaller.
        keeps_slots: whether a slot's number must stay what it was, because somebody has noted it.
        slots_in_use: ``prompt_length + tree_slots``, the part of each pool that is read.
        folded: whether layers answer with the pool (for the folded attention) or with one row per beam.
        handed: in a folded step, the key tensors that layers gave to the model, by identity, with their layer. They
            are not kept alive: where keys are unpacked, there is one layer's at a time.
        handing: the layers that gave any, by identity.
    """

    def __init__(self, num_beams: int):
        self.num_beams = num_beams
        self.reset()

    def reset(self) -> None:
        """Forget the prompt and all beams."""
        self.beams = BeamRows((), self.num_beams, torch.device("cpu"))
        self.prompt_length = 0
        self.tree_slots = 0
        self.slots_in_use = 0
        self.keeps_slots = False
        self._offered = 0  # tree slots that the last `fork` chose from
        self.decoding = False
        self.paths = torch.empty(0, 0, dtype=torch.int64)
        self._write_slots = torch.empty(0, dtype=torch.int64)
        self._wanted = torch.empty(0, 0, dtype=torch.int64)
        self.folded = False
        self.handed: dict[int, tuple[weakref.ref[torch.Tensor], Any]] = {}
        self.handing: dict[int, Any] = {}

    @property
    def batch_size(self) -> int:
        """`B`, prompts; 0 until the prompt is complete."""
        return self.beams.batch_size

    def begin_decode(
        self, batch_size: int, prompt_length: int, device: torch.device, widths: Sequence[int] | None = None
    ) -> None:
        """Close the prompt: from here on each has beams, all at the prompt's end.

        Args:
            batch_size: `B`.
            prompt_length: `P`.
            device: where the table lives.
            widths: beams of each prompt, at least 1; `num_beams` if None.
        """
        self.decoding, self.prompt_length = True, prompt_length
        self.slots_in_use = prompt_length
        self._set_beams([self.num_beams] * batch_size if widths is None else widths, device)
        self.paths = torch.empty(self.beams.count, 0, dtype=torch.int64, device=device)

    def leave(self, kept: Sequence[int]) -> torch.Tensor:
        """Go on with some of the prompts only.

        Args:
            kept: places of these prompts among the present ones, in order.

        Returns:
            ``[R]`` int64: the rows so far that are theirs.
        """
        rows = self.beams.rows_of(kept)
        self._set_beams([self.beams.widths[prompt] for prompt in kept], self.paths.device)
        self.paths, self._write_slots = self.paths.index_select(0, rows), self._write_slots.index_select(0, rows)
        return rows

    def _set_beams(self, widths: Sequence[int], device: torch.device) -> None:
        width = min(max(2, *widths), self.num_beams)  # of a grid of one cell a mask looks like any other
        self.beams = BeamRows(widths, width, device)
        self._wanted = torch.arange(1, width + 1, device=device).expand(len(widths), -1).contiguous()

    def fork(self, parents: torch.Tensor) -> torch.Tensor:
        """Let each beam continue the beam that `parents` names, and give each a slot for its next token.

        Args:
            parents: ``[R]`` int64, row (counted over the batch) that each beam continues.

        Returns:
            0-dim int64, not negative: a report for `set_high_water`, once the host has read it.
        """
        inherited = self.paths.index_select(0, parents)  # [R, t]
        self._offered = self.tree_slots + self.beams.width
        free_so_far = self._free(inherited, self._offered).cumsum(-1)  # [B, S] free up to each slot
        lowest = torch.searchsorted(free_so_far, self._wanted)  # [B, W] where the 1st, 2nd, ... W-th free slot is met
        slots = self.beams.rows(lowest)  # [R]
        self.paths = torch.cat([inherited, slots.unsqueeze(1)], dim=1)
        self._write_slots = slots + self.prompt_length
        return torch.add(self.paths.amax(), free_so_far[:, -1].amin(), alpha=_FREE)

    def set_high_water(self, report: int) -> int:
        """Set `tree_slots` to what the last `fork` reported, which may be less than before.

        Args:
            report: the highest tree slot that a path names, and, times `_FREE`, the fewest free slots that a prompt had
                before it was given new ones (0 if that is not known).

        Returns:
            Slots that the largest tree needs at most.
        """
        least_free, highest_slot = divmod(report, _FREE)
        self._set_slots(highest_slot + 1)
        return self._offered - least_free + self.beams.width

    def bound_high_water(self, report: int | None) -> None:
        """Bound `tree_slots` from what the `fork` before the last one reported: the last gave the lowest free slots."""
        highest_slot = -1 if report is None else report % _FREE
        self._set_slots(highest_slot + 1 + self.beams.width)

    def _set_slots(self, tree_slots: int) -> None:
        self.tree_slots, self.slots_in_use = tree_slots, self.prompt_length + tree_slots

    def is_sparse(self, needed: int) -> bool:
        """Whether slots should move, given how many the largest tree needs."""
        return not self.keeps_slots and self.slots_in_use > MOST_READ * (self.prompt_length + needed)

    def compact(self, needed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Renumber the slots from `needed` on, so that all are smaller; after `set_high_water`, before the next write.

        Slots that the last `fork` gave stay: they were the lowest free ones, so that below them all are live. How many
        others move is not known, for the host reads nothing: places that are left over name slot `needed` twice.

        Args:
            needed: slots that the largest tree needs at most, less than `tree_slots`.

        Returns:
            Two ``[B, n]`` int64: pool slots (prompt included) whose keys must move, and where to.
        """
        free = self._free(self.paths, self.tree_slots)  # [B, S]
        live_so_far = (~free[:, needed:]).cumsum(-1)  # [B, S - needed], counted from slot `needed` on
        most = min(needed, self.tree_slots - needed)
        wanted = torch.arange(1, most + 1, device=free.device).expand(self.batch_size, -1).contiguous()
        old = torch.searchsorted(live_so_far, wanted) + needed  # [B, n]
        new = torch.searchsorted(free[:, :needed].cumsum(-1), wanted)
        below = torch.arange(needed, device=free.device).expand(self.batch_size, -1)
        renumbered = torch.cat([below, new.gather(1, (live_so_far - 1).clamp_min_(0))], dim=1)  # [B, S]
        named = self.beams.cells(self.paths).view(self.batch_size, -1)
        self.paths = self.beams.rows_of_cells(renumbered.gather(1, named).view(-1, self.paths.shape[1]))
        unused = old == self.tree_slots
        self._set_slots(needed)
        places = [slots.masked_fill(unused, needed) + self.prompt_length for slots in (old, new)]
        return places[0], places[1]

    def note_handed(self, keys: torch.Tensor, layer: Any) -> None:
        """In a folded step: these very keys go to the model."""
        self.handed[id(keys)] = (weakref.ref(keys), layer)
        self.handing[id(layer)] = layer

    def drop_pending(self) -> None:
        """Take back the slots that the last `fork` gave."""
        self.paths = self.paths[:, :-1].contiguous()

    def _free(self, paths: torch.Tensor, slots: int) -> torch.Tensor:
        """``[B, slots]`` bool: which tree slots none of the given paths names."""
        marks = torch.ones(self.batch_size, slots, dtype=torch.bool, device=paths.device)
        return marks.scatter_(1, self.beams.cells(paths).view(self.batch_size, -1), False)

    @property
    def newest_position(self) -> int:
        """Cache position of the token that each beam writes next or wrote last: the query of this step."""
        return self.prompt_length + self.paths.shape[1] - 1

    def live(self) -> torch.Tensor:
        """``[B, tree_slots]`` bool: which tree slots some beam names."""
        return ~self._free(self.paths, self.tree_slots)

    def visible(self) -> torch.Tensor:
        """``[B, W, P + tree_slots]`` bool: which slots each beam sees: the prompt's and those on its path."""
        shape = (self.paths.shape[0], self.slots_in_use)
        seen = torch.zeros(shape, dtype=torch.bool, device=self.paths.device)
        seen[:, : self.prompt_length] = True
        seen[:, self.prompt_length :].scatter_(1, self.paths, True)
        return self.beams.grid(seen)

    def visible_additive(self, dtype: torch.dtype) -> torch.Tensor:
        """The same as a mask to be added to scores: ``[B, 1, W, P + tree_slots]`` of `dtype`, 0 or -inf."""
        rows = self.paths.shape[0]
        prompt = torch.zeros(rows, self.prompt_length, dtype=dtype, device=self.paths.device)
        tree = torch.full((rows, self.tree_slots), -torch.inf, dtype=dtype, device=self.paths.device)
        seen = torch.cat([prompt, tree.scatter_(1, self.paths, 0.0)], dim=1)
        return self.beams.cells(seen).view(self.batch_size, 1, self.beams.width, -1)

    def positions(self) -> torch.Tensor:
        """``[B, P + tree_slots]`` int64: the cache position of the token that each slot holds (0 where it is free)."""
        steps = self.paths.shape[1]
        generated = torch.arange(self.prompt_length, self.prompt_length + steps, device=self.paths.device)
        held = torch.zeros(self.batch_size, self.slots_in_use, dtype=torch.int64, device=self.paths.device)
        held[:, : self.prompt_length] = torch.arange(self.prompt_length, device=self.paths.device)
        source = generated.expand(self.batch_size, self.beams.width, -1).reshape(self.batch_size, -1)
        held[:, self.prompt_length :].scatter_(1, self.beams.cells(self.paths).view(self.batch_size, -1), source)
        return held

    def write_slots(self) -> torch.Tensor:
        """``[R]`` int64: the pool slot (prompt included) of the token that each beam is about to write."""
        return self._write_slots

    def rows(self, length: int) -> torch.Tensor:
        """``[R, length]`` int64: the pool slots of each beam's first `length` positions, in order."""
        prompt = torch.arange(min(length, self.prompt_length), device=self.paths.device)
        prompt = prompt.expand(self.paths.shape[0], -1)
        generated = self.paths[:, : max(length - self.prompt_length, 0)] + self.prompt_length
        return torch.cat([prompt, generated], dim=1)

    def check(self) -> None:
        """Raise `AssertionError` unless the table is a forest: numbers in range, one way from the root to each slot."""
        if not self.decoding:
            return
        per_prompt = self.beams.grid(self.paths).tolist()  # host read: not in a search
        for prompt, paths in enumerate(per_prompt):
            ancestors: dict[int, tuple[int, ...]] = {}
            for path in paths:
                for depth, slot in enumerate(path):
                    above = tuple(path[:depth])
                    if not 0 <= slot < self.tree_slots:
                        raise AssertionError(f"prompt {prompt}: slot {slot} is outside 0..{self.tree_slots - 1}")
                    if slot in above:
                        raise AssertionError(f"prompt {prompt}: slot {slot} stands twice on path {path}")
                    if ancestors.setdefault(slot, above) != above:
                        raise AssertionError(f"prompt {prompt}: slot {slot} is shared by paths that differ above it")
