"""Recurrent layers of the hybrid demo: formulas, chunks, steps over state slots, and the whole model."""

import numpy as np
import pytest

from pagecore.errors import ShapeError, UnsupportedOption
from pagecore.index import BlockPool, BlockTables, StateBuffers, StateTable, StepBuffers
from pagecore.serving.demo.hybrid import HybridSizes
from pagecore.serving.demo.linear import HeadTokens, chunk_form, step_form
from pagecore.serving.demo.model import Model, dense_attention
from pagecore.serving.demo.recurrence import recurrence
from pagecore.serving.demo.recurrent import KINDS, RecurrentInputs, RecurrentLayer, RecurrentSizes
from pagecore.serving.demo.states import StepStates, advance
from pagecore.storage import AttentionSpec, StatePool, StateSpec
from tests.together import together

CHUNK = 4
SMALL = HybridSizes(
    vocab_size=64, width=32, num_layers=4, num_query_heads=4, num_kv_heads=2, head_dim=8, hidden_width=32,
    kinds=("mamba2", "attention", "delta", "attention"), state_heads=4, state_groups=2, key_dim=8, value_dim=8,
    chunk=CHUNK, interval=CHUNK,
)  # fmt: skip


def plain(state, tokens, is_delta):
    """Apply the published formula with one token of one head at a time."""
    n, heads, length, _ = tokens.query.shape
    after, output = state.copy(), np.full(tokens.value.shape, np.nan)
    for i, head in np.ndindex(n, heads):
        s = after[i, head]
        for t in range(length):
            k, b = tokens.key[i, head, t], tokens.strength[i, head, t]
            s = np.exp(tokens.log_decay[i, head, t]) * s
            if is_delta:
                s = s @ (np.eye(len(k)) - b * np.outer(k, k))
            s = s + b * np.outer(tokens.value[i, head, t], k)
            output[i, head, t] = s @ tokens.query[i, head, t]
        after[i, head] = s
    return after, output


def drawn(random, n, heads, length, key_dim=5, value_dim=3):
    key = random.standard_normal((n, heads, length, key_dim))
    return HeadTokens(
        query=random.standard_normal(key.shape),
        key=key / np.linalg.norm(key, axis=-1, keepdims=True),
        value=random.standard_normal((n, heads, length, value_dim)),
        log_decay=-random.exponential(0.3, (n, heads, length)),
        strength=random.uniform(0, 1, (n, heads, length)),
    )


@pytest.mark.parametrize("length", [1, 2, 7, 16])
@pytest.mark.parametrize("is_delta", [False, True])
def test_both_forms_equal_the_published_formula(is_delta, length):
    random = np.random.default_rng(length)
    tokens, state = drawn(random, 2, 3, length), random.standard_normal((2, 3, 3, 5))
    wanted = plain(state, tokens, is_delta)
    for form in [chunk_form] + [step_form] * (length == 1):
        for got, expected in zip(form(state, tokens, is_delta=is_delta), wanted, strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("is_delta", [False, True])
def test_tokens_without_decay_and_strength_leave_the_state_unchanged(is_delta):
    random = np.random.default_rng(0)
    tokens, state = drawn(random, 2, 3, 8), random.standard_normal((2, 3, 3, 5))
    tokens.log_decay[0, :, 5:] = tokens.strength[0, :, 5:] = 0
    after, _ = chunk_form(state, tokens, is_delta=is_delta)
    short, _ = chunk_form(state[:1], HeadTokens(*(getattr(tokens, name)[:1, :, :5] for name in HeadTokens.__slots__)),
                          is_delta=is_delta)  # fmt: skip
    np.testing.assert_allclose(after[:1], short, rtol=1e-10, atol=1e-12)


def layer_of(kind, seed=0, dtype=np.float64):
    return RecurrentLayer(RecurrentSizes(kind, 4, 2, 5, 3, 4), np.random.default_rng(seed), dtype)


def inputs_of(layer, length, random):
    projected = random.standard_normal((length, layer.sizes.channels)), *random.standard_normal((2, length, 4))
    return layer.inputs(*projected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_recurrence_equals_the_formula_on_convolved_inputs(kind):
    """A convolution by loops over taps and channels, then the published formula."""
    layer = layer_of(kind)
    inputs = inputs_of(layer, 9, np.random.default_rng(1))
    convolved = np.zeros_like(inputs.channels)
    for t, channel, back in np.ndindex(9, layer.sizes.channels, 4):
        if t >= back:
            convolved[t, channel] += inputs.channels[t - back, channel] * layer.filter[channel, 3 - back]
    convolved /= 1 + np.exp(-convolved)
    query, key, value = (array.swapaxes(0, 1)[None] for array in layer.heads(convolved))
    tokens = HeadTokens(query, key, value, inputs.log_decay.T[None], inputs.strength.T[None])
    _, output = plain(np.zeros((1, 4, 3, 5)), tokens, kind == "delta")
    output = output[0].swapaxes(0, 1)
    if kind == "mamba2":
        output = output + layer.skip[:, None] * value[0].swapaxes(0, 1)
    np.testing.assert_allclose(recurrence(layer, inputs), output.reshape(9, -1), rtol=1e-10, atol=1e-12)


class Served:
    """One recurrent layer over float32 slots of a state table; every output is compared with the recurrence."""

    ROWS = 6

    def __init__(self, kind, seed, in_place):
        self.random = np.random.default_rng(seed)
        self.layer = layer_of(kind, seed)
        spec = StateSpec(self.layer.sizes.planes(), chunk=CHUNK, interval=2 * CHUNK, in_place=in_place)
        self.tables = BlockTables(BlockPool(513), block_sizes=2, max_sequences=self.ROWS, max_blocks_per_sequence=64)
        self.states = StateTable(self.tables, 4 * self.ROWS, chunk=CHUNK, interval=2 * CHUNK, in_place=in_place)
        self.pool = StatePool(spec, num_slots=4 * self.ROWS)
        self.step, self.slots = StepBuffers(self.ROWS, 256), StateBuffers(self.ROWS)
        for plane in self.pool.planes():
            np.from_dlpack(plane)[1:] = np.nan
        self.texts = {}
        self.checkpoints = 0

    def add(self):
        row = self.states.add()
        self.texts[row] = inputs_of(self.layer, 0, self.random)

    def fork(self, row):
        self.texts[self.states.fork(row)] = self.texts[row]

    def cut(self, row):
        """Return to the checkpoint, which gives the state that a cached prefix would."""
        _, length = self.states.checkpoint(row) or (0, 0)
        self.states.truncate([row], [length])
        self.texts[row] = _first(self.texts[row], length)

    def compute(self, counts):
        rows, numbers = list(counts), list(counts.values())
        self.states.prepare(rows, numbers, self.step, self.slots)
        self.pool.zero(self.slots.zeros)
        self.pool.copy(*self.slots.copies.T)
        new = inputs_of(self.layer, sum(numbers), self.random)
        cu = np.concatenate([[0], np.cumsum(numbers)])
        slots = StepStates.of(
            cu, np.asarray(self.step.positions), self.slots.state_read, self.slots.state_write,
            self.slots.checkpoint_write, self.slots.checkpoint_lengths,
        )  # fmt: skip
        planes = [np.from_dlpack(self.pool.plane(name)) for name in ("conv", "temporal")]
        output = advance(self.layer, new, *planes, slots, CHUNK)
        self.checkpoints += np.count_nonzero(slots.checkpoint)
        for row, start, stop in zip(rows, cu[:-1], cu[1:], strict=True):
            part = RecurrentInputs(*(getattr(new, name)[start:stop] for name in RecurrentInputs.__slots__))
            self.texts[row] = _joined(self.texts[row], part)
            wanted = recurrence(self.layer, self.texts[row])[start - stop :]
            np.testing.assert_allclose(output[start:stop], wanted, rtol=1e-4, atol=1e-5)
        self.states.commit(rows)


def _first(inputs, length):
    return RecurrentInputs(*(getattr(inputs, name)[:length] for name in RecurrentInputs.__slots__))


def _joined(first, second):
    names = RecurrentInputs.__slots__
    return RecurrentInputs(*(np.concatenate([getattr(first, name), getattr(second, name)]) for name in names))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_random_steps_over_slots_equal_the_recurrence_from_scratch(kind, in_place):
    served = Served(kind, seed=3, in_place=in_place)
    random = np.random.default_rng(4)
    cuts = 0
    for _ in range(60):
        rows = list(served.texts)
        choice = random.integers(6)
        if len(rows) < served.ROWS and (choice == 0 or not rows):
            served.add()
        elif len(rows) < served.ROWS and choice == 1:
            served.fork(int(random.choice(rows)))
        elif choice == 2 and len(rows) > 2:
            row = int(random.choice(rows))
            served.states.remove([row])
            del served.texts[row]
        elif choice == 3:
            cuts += 1
            served.cut(int(random.choice(rows)))
        else:
            picked = random.permutation(rows)[: random.integers(1, len(rows) + 1)].tolist()
            served.compute({row: int(random.choice([1, 1, 2, CHUNK, 3 * CHUNK + 1])) for row in picked})
    assert served.checkpoints > 10
    assert cuts > 3


def from_scratch(model, tokens):
    return model.forward(
        tokens, np.arange(len(tokens)), lambda _layer, q, k, v: dense_attention(q, k, v),
        lambda layer, inputs: recurrence(model.recurrent[layer], inputs),
    )  # fmt: skip


def test_models_of_one_seed_have_the_same_recurrent_weights_in_every_dtype():
    single, double = Model(SMALL, 5), Model(SMALL, 5, np.float64)
    assert sorted(single.recurrent) == [0, 2]
    assert [single.recurrent[layer].is_delta for layer in (0, 2)] == [False, True]
    for layer, weights in single.recurrent.items():
        for name in ("filter", "bias", "skip"):
            assert (getattr(weights, name) == getattr(double.recurrent[layer], name)).all()
    tokens = np.arange(30)
    np.testing.assert_allclose(
        single.logits(from_scratch(single, tokens)), double.logits(from_scratch(double, tokens)), atol=1e-3
    )


def test_a_late_token_depends_on_the_states_of_the_first():
    model = Model(SMALL, 5, np.float64)
    tokens = np.arange(60)
    changed = tokens.copy()
    changed[0] = 63
    without_attention = [
        model.logits(
            model.forward(
                text, np.arange(60), lambda _layer, q, _k, _v: np.zeros_like(q),
                lambda layer, inputs: recurrence(model.recurrent[layer], inputs),
            )
        )[-1]
        for text in (tokens, changed)
    ]  # fmt: skip
    assert np.abs(without_attention[0] - without_attention[1]).max() > 1e-3


def test_the_specs_of_a_hybrid_model_follow_its_kinds():
    specs = SMALL.specs()
    assert [type(spec) for spec in specs] == [StateSpec, AttentionSpec, StateSpec, AttentionSpec]
    assert [spec.window for spec in specs] == [None] * 4
    assert {plane.name: plane.shape for plane in specs[0].planes} == {"conv": (64, 3), "temporal": (4, 8, 8)}
    assert list(HybridSizes().recurrent) == [0, 1, 3, 4]
    mixed = HybridSizes(kinds=("delta", "attention", "window"))
    assert [mixed.layer_window(layer) for layer in (1, 2)] == [None, mixed.window]
    assert (HybridSizes().num_groups, mixed.num_groups) == (1, 2)


@together(
    ("options", "error", "message"),
    [
        ({"kinds": ("mamba", "attention")}, UnsupportedOption, "expected a tuple of mamba2, delta, attention, window"),
        ({"kinds": "attention"}, UnsupportedOption, "expected a tuple of"),
        ({"kinds": ()}, UnsupportedOption, "expected a tuple of"),
        ({"kinds": ("attention",)}, UnsupportedOption, "layers with attention and recurrent layers"),
        ({"kinds": ("mamba2", "delta")}, UnsupportedOption, "layers with attention and recurrent layers"),
        ({"kinds": ("mamba2", "attention"), "num_layers": 1}, UnsupportedOption, "for 1 layers"),
        ({"state_heads": 4, "state_groups": 3}, ShapeError, "state_groups is 3, which does not divide"),
        ({"chunk": 16, "interval": 24}, ShapeError, "not a multiple of the chunk"),
        ({"kernel": 1}, ShapeError, "kernel is 1"),
        ({"key_dim": 0}, ShapeError, "key_dim is 0"),
        ({"in_place": 1}, UnsupportedOption, "in_place"),
    ],
)
def test_sizes_that_make_no_hybrid_model_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        HybridSizes(**options)
