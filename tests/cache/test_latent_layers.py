"""Layers with latents: written and attended to through the cache, and moved like any other plane."""

import numpy as np
import pytest

from pagecore import (
    Alias,
    LatentSpec,
    PagedKVCache,
    SwapSpace,
    TensorParallel,
    available_isas,
    gather_latent,
    index_scores,
    select_topk,
    set_isa,
    slots_of,
    write_index,
)
from pagecore.errors import PagecoreError, ShapeError, UnsupportedOption
from tests.cache.caches import SPEC, make, normal
from tests.reference.dense import dense_attention

LATENT, ROPE, HEADS, SCALE = 16, 8, 4, 0.3
SPECS = {
    "joint": LatentSpec(LATENT, ROPE, HEADS, scale=SCALE, dtype="float32"),
    "apart": LatentSpec(LATENT, ROPE, HEADS, scale=SCALE, dtype="float32", joint=False),
    "any heads": LatentSpec(LATENT, ROPE, scale=SCALE, dtype="float32"),
    "no rope": LatentSpec(LATENT + ROPE, 0, HEADS, scale=SCALE, dtype="float32"),
    "no rope, apart": LatentSpec(LATENT + ROPE, 0, HEADS, scale=SCALE, dtype="float32", joint=False),
    "window": LatentSpec(LATENT, ROPE, HEADS, scale=SCALE, dtype="float32", window=5),
    "index": LatentSpec(LATENT, ROPE, HEADS, scale=SCALE, dtype="float32", index_dim=8),
}
EVERY_SPEC = pytest.mark.parametrize("name", SPECS)


class Model:
    """Latents, rope parts and queries of each token of a sequence, and the dense reference of its attention."""

    def __init__(self, seed, length=64, latent=LATENT, rope=ROPE):
        self.latent, self.rope = normal(length, latent, seed=seed), normal(length, rope, seed=seed + 100)
        self.query = normal(length, HEADS, latent, seed=seed + 200), normal(length, HEADS, rope, seed=seed + 300)

    def continued(self, length, seed):
        """Return a model with the same first tokens and other later ones."""
        other = Model(seed, latent=self.latent.shape[1], rope=self.rope.shape[1])
        for own, new in zip(self.parts(), other.parts(), strict=True):
            new[:length] = own[:length]
        return other

    def parts(self):
        return self.latent, self.rope, *self.query

    def expected(self, begin, end, window=None, latent=None, rope=None):
        latent, rope = self.latent if latent is None else latent, self.rope if rope is None else rope
        query = np.concatenate([part[begin:end] for part in self.query], axis=-1)
        keys = np.concatenate([latent[:end], rope[:end]], axis=-1)[:, None]
        return dense_attention(query, keys, latent[:end, None], scale=SCALE, window=window)


def model_of(spec, seed):
    return Model(seed, latent=spec.latent_dim, rope=spec.rope_dim)


def step(cache, sequences, models, counts, layer=0, **options):
    """Write and attend the next tokens of each sequence, and commit; return outputs and spans."""
    spans = [(s.num_computed_tokens, s.num_computed_tokens + n) for s, n in zip(sequences, counts, strict=True)]
    pairs = list(zip(models, spans, strict=True))
    batch = cache.prepare(sequences, counts)
    listed = zip(*(model.parts() for model, _ in pairs), strict=True)
    latent, rope, *query = (
        np.concatenate([part[a:b] for part, (a, b) in zip(parts, spans, strict=True)]) for parts in listed
    )
    cache.write(layer, latent, rope, batch)
    out = cache.attend(layer, tuple(query), batch, **options)
    cache.commit(batch)
    return out, spans


def check(cache, sequences, models, counts, window=None):
    out, spans = step(cache, sequences, models, counts)
    expected = [model.expected(a, b, window) for model, (a, b) in zip(models, spans, strict=True)]
    np.testing.assert_allclose(out, np.concatenate(expected), atol=2e-6)


def poisoned(spec, **options):
    """Return a cache whose planes hold NaN."""
    cache = make(spec, **options)
    for layer in range(cache.num_layers):
        for plane in spec.planes if isinstance(spec, LatentSpec) else ():
            cache.plane(plane.name, layer).numpy().view(np.uint8)[1:] = 0xFF
    return cache


def rows(cache, sequence, layer=0):
    """Return the stored bytes of the computed tokens in every plane."""
    table = cache.block_table(cache.group_of(layer)).numpy()[sequence.row]
    at = np.arange(sequence.num_computed_tokens)
    slots = table[at // cache.block_size], at % cache.block_size
    return [cache.plane(plane.name, layer).numpy()[slots].tobytes() for plane in cache.spec(layer).planes]


@EVERY_SPEC
@pytest.mark.parametrize("layout", ["layerwise", "BNHD"])
def test_prefill_and_decode_equal_dense_attention(name, layout):
    spec = SPECS[name]
    cache = poisoned(spec, layout=layout)
    models = [model_of(spec, 1), model_of(spec, 2)]
    sequences = [cache.add_sequence(range(n)) for n in (9, 2)]
    check(cache, sequences, models, [9, 2], spec.window)
    for count in ([1, 1], [3, 2], [1, 1]):
        cache.append_tokens(sequences, [list(range(n)) for n in count])
        check(cache, sequences, models, count, spec.window)
    cache.check_invariants()


def test_a_plan_is_made_for_a_known_number_of_heads():
    batches = [make(SPECS[name]).make_batch() for name in ("joint", "any heads")]
    assert [batch.group(0).plan is None for batch in batches] == [False, True]


@EVERY_SPEC
def test_forks_copy_on_write_and_swap_keep_latents(name):
    spec = SPECS[name]
    cache = poisoned(spec, num_blocks=33)
    space = SwapSpace(cache, num_blocks=9)
    model = model_of(spec, 3)
    parent = cache.add_sequence(range(6))
    check(cache, [parent], [model], [6], spec.window)
    child = cache.fork(parent)
    before = rows(cache, parent) if spec.window is None else None
    other = model.continued(6, seed=4)
    for sequence, own in ((child, other), (parent, model)):
        cache.append_tokens([sequence], [[7, 8, 9]])
        check(cache, [sequence], [own], [3], spec.window)
    if before is not None:
        stored = rows(cache, parent)
        assert [now[: len(then)] for now, then in zip(stored, before, strict=True)] == before
        assert stored != rows(cache, child)
    cache.swap_out([parent], space)
    for plane in spec.planes:
        free = cache._parts.tables.pools[0].ref_counts() == 0
        free[0] = False
        cache.plane(plane.name, 0).numpy().view(np.uint8)[free] = 0xFF
    cache.swap_in([parent])
    if before is not None:
        assert rows(cache, parent) == stored
    cache.append_tokens([parent], [[1]])
    check(cache, [parent], [model], [1], spec.window)
    cache.check_invariants()


def test_a_cached_prefix_of_latents_is_attended_to():
    cache = poisoned(SPECS["joint"])
    model = Model(5)
    first = cache.add_sequence(range(9))
    check(cache, [first], [model], [9])
    cache.remove(first)
    second = cache.add_sequence(range(10))
    assert second.num_cached_tokens == 8
    check(cache, [second], [model], [2])


def test_latents_and_keys_share_a_cache():
    cache = make([SPEC, SPECS["joint"], Alias(1)])
    assert cache.num_groups == 2
    model = Model(6)
    sequence = cache.add_sequence(range(5))
    batch = cache.prepare([sequence], 5)
    key, query = normal(5, 2, 8), normal(5, 4, 8)
    cache.write(0, key, key, batch)
    cache.write(1, model.latent[:5], model.rope[:5], batch)
    np.testing.assert_allclose(cache.attend(0, query, batch), dense_attention(query, key, key), atol=1e-5)
    for layer in (1, 2):
        out = cache.attend(layer, tuple(part[:5] for part in model.query), batch)
        np.testing.assert_allclose(out, model.expected(0, 5), atol=2e-6)
    cache.commit(batch)


def test_ranks_attend_with_their_heads_to_the_same_latents():
    whole, model = SPECS["joint"], Model(7)
    outputs = []
    for rank in range(2):
        cache = make(whole, parallel=TensorParallel(rank, 2))
        assert cache.spec(0).num_query_heads == 2
        sequence = cache.add_sequence(range(6))
        batch = cache.prepare([sequence], 6)
        cache.write(0, model.latent[:6], model.rope[:6], batch)
        heads = slice(2 * rank, 2 * rank + 2)
        outputs.append(cache.attend(0, [part[:6, heads].copy() for part in model.query], batch))
        cache.commit(batch)
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), model.expected(0, 6), atol=2e-6)


def test_slots_select_the_tokens_that_are_attended_to():
    cache, model = poisoned(SPECS["joint"]), Model(8)
    sequence = cache.add_sequence(range(7))
    batch = cache.prepare([sequence], 7)
    cache.write(0, model.latent[:7], model.rope[:7], batch)
    slots = np.asarray(batch.group(0).slot_mapping)[:7].astype(np.int32)
    chosen = np.full((7, 3), -1, np.int32)
    chosen[:, 0] = slots[0]
    chosen[2:, 2] = slots[2]
    out = cache.attend(0, tuple(part[:7] for part in model.query), batch, indices=chosen)
    cache.commit(batch)
    last = [np.concatenate([part[6:7] for part in model.query], axis=-1)]
    seen = np.concatenate([model.latent, model.rope], axis=-1)[[0, 2], None]
    np.testing.assert_allclose(
        out[6:], dense_attention(last[0], seen, model.latent[[0, 2], None], scale=SCALE), atol=2e-6
    )


def test_an_indexer_selects_the_tokens_of_each_query():
    cache, model, rng = poisoned(SPECS["index"], num_blocks=33), Model(11), np.random.default_rng(11)
    sequence = cache.add_sequence(range(20))
    batch = cache.prepare([sequence], 20)
    cache.write(0, model.latent[:20], model.rope[:20], batch)
    planes, group = [cache.plane(name, 0) for name in ("index_key", "index_scale")], batch.group(0)
    write_index(normal(20, 8, seed=12), *planes, group.slot_mapping)
    lists = {"rows": batch.rows, "cu_query_lens": batch.cu_query_lens}
    weights = rng.uniform(size=(20, 2)).astype(np.float32)
    scores = index_scores(normal(20, 2, 8, seed=13), weights, *planes, group.block_table, batch.seq_lens, **lists)
    positions = select_topk(scores, 5)
    slots = slots_of(positions, group.block_table, cache.block_size, **lists)
    out = cache.attend(0, tuple(part[:20] for part in model.query), batch, indices=slots)
    cache.commit(batch)
    for token, listed in enumerate(positions):
        chosen = listed[listed >= 0]
        assert len(chosen) == min(5, token + 1)
        assert (chosen <= token).all()
        query = np.concatenate([part[token : token + 1] for part in model.query], axis=-1)
        seen = np.concatenate([model.latent, model.rope], axis=-1)[chosen, None]
        expected = dense_attention(query, seen, model.latent[chosen, None], scale=SCALE)
        np.testing.assert_allclose(out[token : token + 1], expected, atol=2e-6)


@pytest.fixture(params=available_isas())
def isa(request):
    set_isa(request.param)
    yield request.param
    set_isa(None)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("format", ["float8_e4m3fn", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_formats_attend_to_what_they_store(format):
    """The reference attends to the rows that `gather_latent` reads."""
    factor = 0.02 if format == "float8_e4m3fn" else 1.0
    spec = LatentSpec(512, 64, HEADS, scale=0.05, format=format, key_scale=factor)
    cache = poisoned(spec, block_size=16)
    model = Model(9, latent=512, rope=64)
    sequence = cache.add_sequence(range(21))
    batch = cache.prepare([sequence], 21)
    cache.write(0, model.latent[:21], model.rope[:21], batch)
    out = cache.attend(0, tuple(part[:21] for part in model.query), batch)
    plane, table = cache.plane("latent", 0), cache.block_table(0)
    read = np.asarray(gather_latent(plane, None, table, batch.seq_lens, rows=batch.rows, latent_scale=factor))
    cache.commit(batch)
    latent = read[:, :512]
    assert 0 < np.abs(latent - model.latent[:21]).max() < 0.6
    query = np.concatenate([part[:21] for part in model.query], axis=-1)
    expected = dense_attention(query, read[:, None], latent[:, None], scale=0.05)
    np.testing.assert_allclose(out, expected, atol=2e-3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            lambda m: {"query": m.query[0][:5]},
            UnsupportedOption,
            r"query is a ndarray.*pass \(query_latent, query_rope\)",
        ),
        (lambda m: {"query": (m.query[0][:5],)}, UnsupportedOption, "query is a tuple"),
        (lambda m: {"query": tuple(part[:5, :2] for part in m.query)}, ShapeError, "heads"),
        (lambda m: {"latent": m.latent[:3]}, ShapeError, "latent has 3 tokens; the step has 5"),
        (lambda m: {"latent": m.latent[:5, :7]}, ShapeError, "latent"),
        (lambda m: {"rope": m.rope[:4]}, ShapeError, "rope"),
    ],
)
def test_arrays_that_do_not_fit_raise(change, error, message):
    cache, model = poisoned(SPECS["joint"]), Model(10)
    arguments = {"latent": model.latent[:5], "rope": model.rope[:5], "query": tuple(p[:5] for p in model.query)}
    arguments |= change(model)
    batch = cache.prepare([cache.add_sequence(range(5))], 5)
    before = cache.plane("latent", 0).numpy().tobytes()
    if "query" in change(model):
        with pytest.raises(error, match=message):
            cache.attend(0, arguments["query"], batch)
    else:
        with pytest.raises(error, match=message):
            cache.write(0, arguments["latent"], arguments["rope"], batch)
    assert cache.plane("latent", 0).numpy().tobytes() == before


def test_a_cache_of_ids_has_no_latents_to_write():
    cache = PagedKVCache(SPECS["joint"], num_blocks=5, device="none")
    batch = cache.prepare([cache.add_sequence(range(3))], 3)
    with pytest.raises(PagecoreError, match="none"):
        cache.write(0, normal(3, LATENT), normal(3, ROPE), batch)
