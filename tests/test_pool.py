"""The pool and the attention over it, against the plain way: whole copies of every beam's keys, attention per row."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from hf_paged_beam import PagedBeamCache
from hf_paged_beam.cache import CannotFoldError, FoldedStep
from hf_paged_beam.cache.attention import fold, folded_attention, unfold
from hf_paged_beam.cache.index import BeamIndex
from hf_paged_beam.cache.layers import GROWTH, LEAST_SPARE, CrossLayer, PoolLayer, one_row_per_prompt
from hf_paged_beam.cache.mask import pool_mask
from hf_paged_beam.cache.rows import BeamRows
from hf_paged_beam.cache.step import current_step

CPU = torch.device("cpu")
MODULE = torch.nn.Module()  # what transformers' attention functions are called on; nothing of it is read here


def examples(count: int):
    """The same examples at every run, as many as stated, however long one takes."""
    return settings(max_examples=count, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes, in the letters of the package: prompts, beams, prompt columns, steps, heads, head sizes."""

    B: int
    W: int
    P: int
    T: int
    Hkv: int
    G: int
    D: int
    Dv: int

    @property
    def H(self) -> int:
        return self.Hkv * self.G

    @property
    def length(self) -> int:
        return self.P + self.T


SHAPES = st.builds(
    Shape, B=st.integers(1, 3), W=st.integers(1, 5), P=st.integers(1, 6), T=st.integers(1, 7), Hkv=st.integers(1, 3),
    G=st.integers(1, 3), D=st.integers(1, 5), Dv=st.integers(1, 5),
)  # fmt: skip
SEEDS = st.integers(0, 2**31)


class Copies:
    """A pool layer, and beside it what transformers stores: whole keys and values of every beam, copied at each step.

    The last step is left to `last_update`, because a folded step has to be running then.
    """

    def __init__(self, shape: Shape, seed: int):
        self.shape, self.generator = shape, torch.Generator().manual_seed(seed)
        self.index = BeamIndex(shape.W)
        self.layer = PoolLayer(self.index)
        keys, values = self.states(shape.B, shape.P)
        self.layer.update(keys, values)
        self.index.begin_decode(shape.B, shape.P, CPU)
        self.keys, self.values = (states.repeat_interleave(shape.W, dim=0) for states in (keys, values))
        for _ in range(shape.T - 1):
            self.fork()
            self.last_update()
        self.fork()

    def states(self, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape
        return (self.random(rows, shape.Hkv, columns, shape.D), self.random(rows, shape.Hkv, columns, shape.Dv))

    def random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=self.generator, dtype=torch.float64)

    def fork(self) -> None:
        shape = self.shape
        parents = torch.randint(shape.W, (shape.B, shape.W), generator=self.generator)
        rows = (parents + torch.arange(shape.B).unsqueeze(1) * shape.W).flatten()
        self.index.set_high_water(int(self.index.fork(rows)))
        self.keys, self.values = self.keys[rows], self.values[rows]

    def last_update(self) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.states(self.shape.B * self.shape.W, 1)
        self.keys, self.values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        return self.layer.update(keys, values)

    def query(self) -> torch.Tensor:
        """``[B·W, H, 1, D]``, laid out as models have it after their transposition."""
        return self.random(self.shape.B * self.shape.W, 1, self.shape.H, self.shape.D).transpose(1, 2)


def plain_attention(copies: Copies, query, mask=None, *, scaling=None, bias=None, softcap=None, sinks=None):
    """Attention of each row over its own copy, written out: ``[B·W, 1, H, Dv]``.

    Args:
        mask: bool or additive over positions, broadcast to ``[B·W, H, 1, length]``.
        bias: added to the scores, same shape.
        sinks: ``[H]``.
    """
    keys, values = (one.repeat_interleave(copies.shape.G, dim=1) for one in (copies.keys, copies.values))
    scores = query @ keys.transpose(-1, -2) * (copies.shape.D**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(len(scores), -1, -1, -1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
    return (weights @ values).transpose(1, 2)


def check_folded(copies: Copies, make_mask=None, *, tolerance=1e-9, expected_mask=None, bias=None, **options) -> None:
    """Assert that folded attention over the pool equals attention per row over copies.

    Args:
        make_mask: called inside the step; what the model would hand to its attention.
        expected_mask: the same over positions; left out where both are one.
        bias: ``[1 or B·W, H, 1, length]``.
    """
    query = copies.query()
    with FoldedStep(copies.index) as step:
        key, value = copies.last_update()
        assert key.shape[0] == copies.shape.B  # the pool, not one row per beam
        mask = None if make_mask is None else make_mask()
        output, maps = folded_attention(MODULE, query, key, value, mask, position_bias=bias, **options)
        assert step.all_attended() and maps is None
    expected = plain_attention(
        copies, query, mask if expected_mask is None else expected_mask, bias=bias, scaling=options.get("scaling"),
        softcap=options.get("softcap"), sinks=options.get("s_aux"),
    )  # fmt: skip
    assert output.shape == expected.shape
    assert (output - expected).abs().max() <= tolerance


# Folding --------------------------------------------------------------------------------------------------------------


@examples(60)
@given(SHAPES, SEEDS)
def test_fold_and_unfold_are_inverse(shape, seed):
    """Folding loses nothing, keeps each head with its keys, and unfolding puts all back."""
    query = torch.randn(shape.B * shape.W, shape.H, 1, shape.D, generator=torch.Generator().manual_seed(seed))
    beams = BeamRows([shape.W] * shape.B, shape.W, CPU)
    folded = fold(query, beams, shape.Hkv)
    assert folded.shape == (shape.B, shape.Hkv, shape.G * shape.W, shape.D)
    assert torch.equal(unfold(folded, beams, shape.G), query.transpose(1, 2))
    for row in range(shape.B * shape.W):
        for head in range(shape.H):
            b, w, key_head, group = row // shape.W, row % shape.W, head // shape.G, head % shape.G
            assert torch.equal(folded[b, key_head, group * shape.W + w], query[row, head, 0])


@examples(60)
@given(SHAPES, SEEDS, st.sampled_from([None, 0.3]))
def test_folded_attention_is_attention_per_beam(shape, seed, scaling):
    """Random trees, grouped heads, values of another size than keys: each beam attends to its own history alone."""
    check_folded(Copies(shape, seed), scaling=scaling)


@examples(60)
@given(SHAPES, SEEDS, st.sampled_from([None, 1, 3]), st.booleans())
def test_masks_of_index_functions(shape, seed, window, use_vmap):
    """transformers' mask function (causal, or a window) and a padding mask, evaluated at what the slots hold."""
    copies = Copies(shape, seed)
    length, rows = shape.length, shape.B * shape.W
    padding = torch.arange(length) >= torch.randint(shape.P, (shape.B, 1), generator=copies.generator)  # [B, length]
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    per_row = padding.repeat_interleave(shape.W, dim=0)

    def make_mask():
        return pool_mask(
            batch_size=rows, q_length=1, kv_length=length, q_offset=length - 1, mask_function=function,
            attention_mask=per_row, use_vmap=use_vmap,
        )  # fmt: skip

    in_window = torch.arange(length) > length - 1 - (window or length)
    check_folded(copies, make_mask, expected_mask=(per_row & in_window)[:, None, None, :])


@examples(60)
@given(SHAPES, SEEDS, st.booleans(), st.booleans(), st.booleans())
def test_foreign_masks_over_positions(shape, seed, boolean, per_head, one_for_all):
    """A mask that the model made itself, over cache positions, bool or additive, for all rows or for each prompt."""
    copies = Copies(shape, seed)
    heads, prompts = shape.H if per_head else 1, 1 if one_for_all else shape.B
    allowed = copies.random(prompts, heads, 1, shape.length) > 0
    allowed[..., -1] = True
    additive = copies.random(prompts, heads, 1, shape.length).masked_fill(~allowed, torch.finfo(torch.float32).min)
    mask = allowed if boolean else additive
    check_folded(copies, lambda: mask if one_for_all else mask.repeat_interleave(shape.W, dim=0))


@examples(60)
@given(SHAPES, SEEDS, st.booleans(), st.booleans())
def test_position_bias(shape, seed, one_for_all, masked):
    """A bias of each head over positions (T5), alone or with a padding mask over positions."""
    copies = Copies(shape, seed)
    bias = copies.random(1 if one_for_all else shape.B, shape.H, 1, shape.length)
    seen = torch.arange(shape.length).expand(shape.B * shape.W, 1, 1, -1) >= shape.P - 1
    check_folded(
        copies, (lambda: seen) if masked else None,
        bias=bias if one_for_all else bias.repeat_interleave(shape.W, dim=0),
    )  # fmt: skip


@examples(60)
@given(SHAPES, SEEDS, st.booleans(), st.booleans())
def test_softcap_and_sinks(shape, seed, with_softcap, with_sinks):
    """Soft-capped scores and attention sinks, with a mask over positions."""
    copies = Copies(shape, seed)
    seen = torch.arange(shape.length).expand(1, 1, 1, -1) >= shape.P - 1
    sinks = copies.random(shape.H) if with_sinks else None
    tolerance = 1e-5 if with_softcap or with_sinks else 1e-9  # its softmax is in float32, as transformers' is
    check_folded(copies, lambda: seen, softcap=2.0 if with_softcap else None, s_aux=sinks, tolerance=tolerance)


@examples(60)
@given(SHAPES, SEEDS, st.sampled_from([None, "bool", "additive"]), st.booleans(), st.booleans())
def test_cross_attention(shape, seed, kind, per_beam, biased):
    """Keys of an encoder at one row per prompt, with masks of one row per prompt or per beam, with and without bias."""
    copies = Copies(shape, seed)
    layer = CrossLayer(copies.index)
    copies.index.paths, paths = None, copies.index.paths  # cross keys are computed during the prompt
    copies.keys, copies.values = copies.states(shape.B, shape.length)
    layer.update(copies.keys, copies.values)
    copies.index.paths = paths
    copies.keys, copies.values = (one.repeat_interleave(shape.W, dim=0) for one in (copies.keys, copies.values))
    assert torch.equal(layer.keys, copies.keys)  # gathered: repeated
    query = copies.query()
    allowed = copies.random(shape.B, 1, 1, shape.length) > 0
    allowed[..., 0] = True
    additive = torch.zeros_like(allowed, dtype=torch.float64).masked_fill(~allowed, torch.finfo(torch.float64).min)
    narrow = {None: None, "bool": allowed, "additive": additive}[kind]
    wide = None if narrow is None else narrow.repeat_interleave(shape.W, dim=0)
    bias = copies.random(1, shape.H, 1, shape.length) if biased else None
    with FoldedStep(copies.index):
        output, _ = folded_attention(
            MODULE, query, layer.keys, layer.values, wide if per_beam else narrow, position_bias=bias
        )
    expected = plain_attention(copies, query, wide, bias=bias)
    assert (output - expected).abs().max() <= 1e-9


SMALL = Shape(B=2, W=3, P=4, T=3, Hkv=2, G=2, D=4, Dv=4)


def test_keys_that_the_cache_did_not_hand_out_cannot_be_folded():
    """A model that changes its keys after the cache returned them is found out, not answered wrongly."""
    copies = Copies(SMALL, 0)
    query = copies.query()
    with FoldedStep(copies.index) as step:
        key, value = copies.last_update()
        with pytest.raises(CannotFoldError, match="did not hand out"):
            folded_attention(MODULE, query, key * 2, value, None)
        assert not step.all_attended()


@pytest.mark.parametrize(
    ("mask_rows", "columns", "queries", "reason"),
    [(6, 6, 1, "does not cover"), (5, 7, 1, "5 rows"), (1, 7, 2, "one query per beam")],
)
def test_masks_and_queries_that_cannot_be_folded(mask_rows, columns, queries, reason):
    """A mask that is too short or has a wrong number of rows, or several queries per beam: an error that says so."""
    copies = Copies(SMALL, 0)
    query = copies.query().expand(-1, -1, queries, -1)
    mask = torch.ones(mask_rows, 1, 1, columns, dtype=torch.bool)
    with FoldedStep(copies.index):
        key, value = copies.last_update()
        with pytest.raises(CannotFoldError, match=reason):
            folded_attention(MODULE, query, key, value, mask)


def test_nothing_of_a_step_is_left_after_it():
    """After a folded step, also one that raised, layers answer with rows and the attention is plain SDPA."""
    copies = Copies(SMALL, 0)
    with pytest.raises(KeyboardInterrupt), FoldedStep(copies.index):
        copies.last_update()
        raise KeyboardInterrupt
    assert not copies.index.folded and not copies.index.handed
    assert torch.equal(copies.layer.keys, copies.keys)
    query, module = copies.query(), torch.nn.Module()
    module.num_key_value_groups = SMALL.G
    output, _ = folded_attention(module, query, copies.layer.keys, copies.layer.values, None)
    assert torch.allclose(output, plain_attention(copies, query))


class Interrupted(dict):
    """The fields of a configuration whose attention cannot be set, or not be put back, because of Ctrl-C."""

    def __init__(self, at: str):
        super().__init__(_attn_implementation_internal="sdpa")
        self.at = at

    def __setitem__(self, field, value):
        if (value == "hf_paged_beam") == (self.at == "entering"):
            raise KeyboardInterrupt
        super().__setitem__(field, value)


@pytest.mark.parametrize("at", ["entering", "leaving"])
def test_an_interrupted_step_leaves_nothing(at):
    """Ctrl-C while a step begins or ends: no step is current after it, and no other configuration stays borrowed."""
    copies = Copies(SMALL, 0)
    other = {"_attn_implementation_internal": "eager"}
    with pytest.raises(KeyboardInterrupt), FoldedStep(copies.index, [other, Interrupted(at)]):
        pass
    assert current_step() is None
    assert not copies.index.folded
    assert other == {"_attn_implementation_internal": "eager"}


# The pool -------------------------------------------------------------------------------------------------------------


@examples(60)
@given(SHAPES, SEEDS)
def test_gathered_rows_are_the_copies(shape, seed):
    """The gathered read returns, bit for bit, what copying whole caches at every step would have kept."""
    copies = Copies(shape, seed)
    keys, values = copies.last_update()
    assert torch.equal(keys, copies.keys) and torch.equal(values, copies.values)
    assert torch.equal(copies.layer.keys, keys) and copies.layer.get_seq_length() == shape.length


@examples(40)
@given(SHAPES, SEEDS, st.integers(1, 40))
def test_a_pool_grows_by_little_and_loses_nothing(shape, seed, steps):
    """Growth is at most what the constants say; what stands in the pool stays; the unwritten is 0."""
    copies = Copies(dataclasses.replace(shape, T=1), seed)
    index, layer = copies.index, copies.layer
    held, written = layer._keys.shape[2], set(range(shape.P))
    for _ in range(steps):
        copies.last_update()
        written |= set(index.write_slots().flatten().tolist())
        needed, before, held = shape.P + index.tree_slots, held, layer._keys.shape[2]
        assert held == layer._values.shape[2] >= needed
        assert held == before or (before < needed and held <= needed + max(needed // GROWTH, LEAST_SPARE))
        assert torch.equal(layer.keys, copies.keys) and torch.equal(layer.values, copies.values)
        unwritten = [slot for slot in range(held) if slot not in written]
        assert not layer._keys[:, :, unwritten].any() and not layer._values[:, :, unwritten].any()
        copies.fork()


def test_growth_is_rare():
    """Beams that never meet again fill 4 slots a step; the pool is reallocated 30 times in 500 steps at most."""
    index = BeamIndex(4)
    layer = PoolLayer(index)
    layer.update(torch.zeros(1, 1, 50, 2), torch.zeros(1, 1, 50, 2))
    index.begin_decode(1, 50, CPU)
    sizes = set()
    for _ in range(500):
        index.set_high_water(int(index.fork(torch.arange(4))))
        layer.update(torch.ones(4, 1, 1, 2), torch.ones(4, 1, 1, 2))
        sizes.add(layer._keys.shape[2])
    assert index.tree_slots == 2000
    assert len(sizes) <= 30


def test_a_beam_takes_one_token_per_step():
    """Several tokens at once belong to the prompt only."""
    copies = Copies(SMALL, 0)
    with pytest.raises(ValueError, match="one token per step, but got 2"):
        copies.layer.update(*copies.states(SMALL.B * SMALL.W, 2))


# How much of it is read -----------------------------------------------------------------------------------------------


class Moving(Copies):
    """As `Copies`, with what the cache does after a fork: live slots that lie far apart move together.

    Attributes:
        moves: how often they did.
    """

    moves = 0

    def fork(self, parents: torch.Tensor | None = None) -> None:
        shape = self.shape
        if parents is None:
            parents = torch.randint(shape.W, (shape.B, shape.W), generator=self.generator)
        rows = (parents + torch.arange(shape.B).unsqueeze(1) * shape.W).flatten()
        needed = self.index.set_high_water(int(self.index.fork(rows)))
        assert needed == self.most_live()
        if self.index.is_sparse(needed):
            self.layer.move(*self.index.compact(needed))
            self.moves += 1
        self.keys, self.values = self.keys[rows], self.values[rows]

    def most_live(self) -> int:
        return int(self.index.live().sum(1).max())

    def check_what_is_read(self) -> None:
        """The read part holds all live slots and not many more; every beam's history is what copies would be."""
        index, prompt = self.index, self.index.prompt_length
        index.check()
        assert int(index.paths.max()) < index.tree_slots
        assert index.slots_in_use <= 1.25 * (prompt + self.most_live())
        assert torch.equal(index.write_slots() - prompt, index.paths[:, -1])
        keys, values = self.last_update()
        assert torch.equal(keys, self.keys) and torch.equal(values, self.values)


@examples(100)
@given(SHAPES, SEEDS, st.lists(st.sampled_from(["any", "own", "one"]), min_size=4, max_size=30))
def test_little_more_is_read_than_lives(shape, seed, kinds):
    """Beams that part and meet at random: what is read, gathered and folded, and no history is lost by moving."""
    copies = Moving(dataclasses.replace(shape, T=1), seed)
    copies.check_what_is_read()
    for kind in kinds:
        own, one = torch.arange(shape.W).expand(shape.B, -1), torch.full((shape.B, shape.W), shape.W - 1)
        copies.fork({"any": None, "own": own, "one": one}[kind])
        copies.check_what_is_read()
    steps = len(kinds) + 2
    copies.fork()
    copies.shape = dataclasses.replace(copies.shape, T=steps)
    check_folded(copies)


@pytest.mark.parametrize(("prompts", "prompt"), [(1, 4), (3, 4), (1, 500)])
def test_slots_move_when_many_beams_end_at_once(prompts, prompt):
    """Twenty beams run apart for thirty steps and go on from the last of them: its history moves, in place, once.

    Beside a prompt of 500 tokens, 600 slots of beams that ended are too much as well.
    """
    shape = Shape(B=prompts, W=20, P=prompt, T=1, Hkv=1, G=1, D=2, Dv=2)
    copies = Moving(shape, 0)
    copies.last_update()
    for _ in range(30):
        copies.fork(torch.arange(20).expand(prompts, -1))
        copies.last_update()
    assert copies.moves == 0 and copies.index.tree_slots == 31 * 20
    pool = copies.layer._keys
    copies.fork(torch.full((prompts, 20), 19))
    assert copies.moves == 1 and copies.index.tree_slots == 31 + 20
    copies.check_what_is_read()
    assert copies.layer._keys is pool
    assert copies.index.paths.flatten().unique().tolist() == list(range(51))
    for _ in range(30):
        copies.fork(torch.full((prompts, 20), 19))
        copies.check_what_is_read()
    assert copies.moves == 1


def test_slots_that_move_by_hand():
    """The tree of index.py's header: of nine slots four live; two of them move into the lowest free ones."""
    index = BeamIndex(2)
    index.begin_decode(1, 0, CPU)
    index.paths = torch.tensor([[0, 4, 8], [0, 4, 1]])
    index._set_slots(9)
    assert index.is_sparse(4) and not index.is_sparse(8)
    old, new = index.compact(4)
    assert index.paths.tolist() == [[0, 2, 3], [0, 2, 1]]
    assert (old.tolist(), new.tolist()) == ([[4, 8, 4, 4]], [[2, 3, 4, 4]])  # 4 to 4: nothing moves
    assert index.tree_slots == index.slots_in_use == 4
    index.check()


def test_slots_that_somebody_noted_stay():
    """A trace names slots: they must not move while it is made."""
    index = BeamIndex(2)
    index.begin_decode(1, 0, CPU)
    index._set_slots(100)
    assert index.is_sparse(4)
    index.keeps_slots = True
    assert not index.is_sparse(4)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_a_cache_moves_the_slots_of_all_layers(kv_dtype):
    """By the cache's own verbs, packed or not, while a layer that takes no part in decoding stays as it is."""
    cache = PagedBeamCache(LlamaConfig(num_hidden_layers=3), 8, kv_dtype=kv_dtype)
    cache.accept_wide_prompt(False)
    for layer in range(3):
        cache.update(torch.ones(1, 1, 4, 3), torch.ones(1, 1, 4, 3), layer)
    cache.begin_decode(1, CPU)
    expected = torch.ones(8, 1, 4, 3)
    for step in range(12):
        parents = torch.full((8,), 7) if step == 11 else torch.arange(8)
        report = int(cache.fork(parents))
        if step == 11:
            assert cache.index.tree_slots == 11 * 8
        cache.grow(report)
        states = torch.full((8, 1, 1, 3), float(step)) * torch.arange(1, 9).view(8, 1, 1, 1)
        expected = torch.cat([expected[parents], states], dim=2)
        for layer in range(2):
            keys, values = cache.update(states, states, layer)
            assert torch.allclose(keys, expected, rtol=0.02) and torch.allclose(values, expected, rtol=0.02)
    assert cache.index.tree_slots == 11 + 8
    assert cache.layers[2]._keys.shape[2] == 4
    assert cache.usage().free == 0


# One row per prompt ---------------------------------------------------------------------------------------------------


def test_one_row_per_prompt_keeps_the_first_row():
    """Rows that are equal, up to what a model's kernels round differently, become one."""
    prompts = torch.randn(3, 2, 5, 4, generator=torch.Generator().manual_seed(0))
    rows = prompts.repeat_interleave(4, dim=0)
    assert torch.equal(one_row_per_prompt(rows, 4), prompts)
    rows[1] *= 1 + 1e-6
    assert torch.equal(one_row_per_prompt(rows, 4), prompts)
    assert one_row_per_prompt(torch.zeros(8, 2, 0, 4), 4).shape == (2, 2, 0, 4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_one_row_per_prompt_refuses_rows_that_differ(dtype):
    """One entry of one row that differs by a tenth of the largest is enough."""
    rows = torch.ones(8, 2, 5, 4, dtype=dtype)
    rows[6, 1, 3, 2] = 0.9
    with pytest.raises(ValueError, match="the 4 rows of one prompt hold different keys or values"):
        one_row_per_prompt(rows, 4)


def test_one_row_per_prompt_refuses_another_number_of_rows():
    """The message says for which width the cache was made, and what came."""
    with pytest.raises(ValueError, match="made for num_beams=4, but got 6 rows"):
        one_row_per_prompt(torch.zeros(6, 2, 5, 4), 4)


# What a cache holds ---------------------------------------------------------------------------------------------------


def cache_step(cache: PagedBeamCache, parents: list[int], states: torch.Tensor) -> None:
    """One step of a search on every layer, with the same states as keys and values."""
    cache.grow(int(cache.fork(torch.tensor(parents))))
    for layer in range(len(cache.layers)):
        cache.update(states, states, layer)


def filled_cache(config: LlamaConfig, num_beams: int, prompt: torch.Tensor) -> PagedBeamCache:
    """A cache that holds a prompt, one row per prompt, at the beginning of decoding."""
    cache = PagedBeamCache(config, num_beams)
    cache.accept_wide_prompt(False)
    for layer in range(len(cache.layers)):
        cache.update(prompt, prompt, layer)
    cache.begin_decode(len(prompt), CPU)
    return cache


def test_usage_by_hand():
    """Two beams, a prompt of 4 tokens, 2 layers, one head of size 3 in float32: 48 bytes per token.

    step 1, parents 0 0:  paths 0        1            slots 0 1
    step 2, parents 0 1:  paths 0 2      1 3          slots 2 3
    step 3, parents 0 1:  paths 0 2 4    1 3 5        slots 4 5: 4 + 6 = 10 slots are needed; step 1 made it 14
    step 4, parents 0 0:  paths 0 2 4 1  0 2 4 3      1 3 5 were free, the lowest two are reused, 5 is no more read
    """
    cache = filled_cache(LlamaConfig(num_hidden_layers=2), 2, torch.ones(1, 1, 4, 3))
    usage = cache.usage()
    assert (usage.slots, usage.live, usage.free) == (4, 4, 0)
    assert (usage.bytes_held, usage.bytes_live, usage.bytes_separate) == (4 * 48, 4 * 48, 2 * 4 * 48)
    for parents in ([0, 0], [0, 1], [0, 1], [0, 0]):
        cache_step(cache, parents, torch.ones(2, 1, 1, 3))
        cache.check()
    assert cache.index.paths.tolist() == [[0, 2, 4, 1], [0, 2, 4, 3]]
    usage = cache.usage()
    assert (usage.slots, usage.live, usage.free) == (9, 9, 0)
    assert usage.bytes_held == (6 + LEAST_SPARE) * 48
    assert usage.bytes_live == 9 * 48
    assert usage.bytes_separate == 2 * 8 * 48
    for told in ("num_beams=2", "batch_size=1", "prompt_length=4", "slots=9", "live=9", "free=0"):
        assert told in repr(cache)


def test_usage_counts_every_prompt():
    """Slots are counted over the prompts: two prompts whose trees differ in size hold the larger one's room each.

    prompt 0, parents 0 1:  paths 0 2, 1 3     4 tree slots live
    prompt 1, parents 1 1:  paths 1 0, 1 2     3 tree slots live, slot 3 is free
    """
    cache = filled_cache(LlamaConfig(num_hidden_layers=1), 2, torch.ones(2, 1, 5, 3))
    for parents in ([0, 0, 2, 2], [0, 1, 3, 3]):
        cache_step(cache, parents, torch.ones(4, 1, 1, 3))
    assert cache.index.paths.tolist() == [[0, 2], [1, 3], [1, 0], [1, 2]]
    usage = cache.usage()
    assert (usage.slots, usage.live, usage.free) == (2 * (5 + 4), 2 * 5 + 4 + 3, 1)
    assert usage.bytes_separate == 4 * 7 * 24
    cache.check()


def test_usage_of_a_large_model():
    """Llama-3-8B, prompt of 1000, 200 new tokens, 4 beams that never meet: 225 MiB where separate ones need 600 MiB."""
    config = LlamaConfig(num_hidden_layers=32)
    cache = filled_cache(config, 4, torch.empty(1, 8, 1000, 128, dtype=torch.bfloat16, device="meta"))
    states = torch.empty(4, 8, 1, 128, dtype=torch.bfloat16, device="meta")
    for _ in range(200):
        cache_step(cache, [0, 1, 2, 3], states)
    usage = cache.usage()
    assert usage.slots == usage.live == 1800
    assert (usage.bytes_live / 2**20, usage.bytes_separate / 2**20) == (225.0, 600.0)
    assert usage.bytes_held <= 1.25 * usage.bytes_live


def damage_pool(cache: PagedBeamCache) -> None:
    cache.layers[1]._keys = cache.layers[1]._keys[:, :, : cache.index.slots_in_use - 1]


def damage_length(cache: PagedBeamCache) -> None:
    cache.layers[1].length -= 2


def damage_path(cache: PagedBeamCache) -> None:
    cache.index.paths[0, 1] = cache.index.paths[0, 0]


@pytest.mark.parametrize("damage", [damage_pool, damage_length, damage_path])
def test_check_fails_on_a_damaged_cache(damage):
    """A layer whose pool is too small, a layer that missed a step, a path that names a slot twice."""
    cache = filled_cache(LlamaConfig(num_hidden_layers=2), 2, torch.ones(1, 1, 4, 3))
    for parents in ([0, 0], [0, 1], [0, 1]):
        cache_step(cache, parents, torch.ones(2, 1, 1, 3))
    cache.check()
    damage(cache)
    with pytest.raises(AssertionError):
        cache.check()
