"""write_kv under jax.jit: parity with pagecore.write_kv, writes in place, and arguments that keep their values."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from pagecore.errors import UnsupportedOption
from tests.interop.jax.on_jax import laid_out, random_write, same, written
from tests.ops.cases import DTYPES


def addresses(arrays):
    return [array.unsafe_buffer_pointer() for array in arrays]


@pytest.mark.parametrize("rows_dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", DTYPES)
def test_a_donated_cache_is_written_in_place(jax, interop, rows_dtype, cache_dtype):
    rows, caches, slots = random_write(1, rows_dtype, cache_dtype)
    step = jax.jit(interop.write_kv, donate_argnums=(2, 3))
    given = [jax.numpy.array(cache) for cache in caches]
    before = addresses(given)
    after = step(*rows, *given, slots)
    assert addresses(after) == before
    assert all(cache.is_deleted() for cache in given)
    assert same(after, written(rows, caches, slots))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    "scales", [{"key_scale": 0.3, "value_scale": [2.0, 0.25]}, {"value_scale": 4}, {"key_scale": [0.3]}]
)
def test_layouts_and_scales(jax, interop, layout, scales):
    rows, caches, slots = random_write(2, cache_dtype="bfloat16")
    step = jax.jit(functools.partial(interop.write_kv, layout=layout, **scales), donate_argnums=(2, 3))
    after = step(*rows, *(jax.numpy.array(laid_out(cache, layout)) for cache in caches), slots)
    assert same(after, [laid_out(cache, layout) for cache in written(rows, caches, slots, **scales)])


def test_a_cache_that_is_not_donated_is_unchanged(jax, interop):
    rows, caches, slots = random_write(3)
    given = [jax.numpy.array(cache) for cache in caches]
    after = jax.jit(interop.write_kv)(*rows, *given, slots)
    assert same(given, caches)
    assert same(after, written(rows, caches, slots))


def test_with_copies_allowed_old_and_new_contents_can_be_used(jax, interop):
    """The old cache is used after the write, so XLA copies it although it was donated."""
    rows, caches, slots = random_write(4)

    def step(key_cache, value_cache):
        after = interop.write_kv(*rows, key_cache, value_cache, slots, copy=None)
        return after, (key_cache * 2, value_cache * 2)

    after, doubled = jax.jit(step, donate_argnums=(0, 1))(*(jax.numpy.array(cache) for cache in caches))
    assert same(after, written(rows, caches, slots))
    assert same(doubled, [cache * 2 for cache in caches])


def test_with_copies_allowed_a_call_outside_of_jit_works(jax, interop):
    rows, caches, slots = random_write(5)
    given = [jax.numpy.array(cache) for cache in caches]
    after = interop.write_kv(*rows, *given, slots, copy=None)
    assert same(given, caches)
    assert same(after, written(rows, caches, slots))


def test_disable_jit_allows_copies(jax, interop):
    rows, caches, slots = random_write(5)
    step = interop.jit(lambda k, v: interop.write_kv(*rows, k, v, slots), caches=("k", "v"))
    with jax.disable_jit():
        after = step(*(jax.numpy.array(cache) for cache in caches))
    assert same(after, written(rows, caches, slots))


def test_a_result_that_does_not_alias_its_argument_has_the_old_contents_and_the_write(jax, interop):
    """A call without input_output_aliases, which pagecore itself never makes."""
    rows, caches, slots = random_write(6)
    results = [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in caches]
    plain = dict.fromkeys(("given", "heads_first", "key_format", "value_format", "four_over_six"), np.int64(0))
    call = jax.jit(lambda *arrays: jax.ffi.ffi_call("pagecore_write_kv", results)(*arrays, **plain))
    given = [jax.numpy.array(cache) for cache in caches]
    after = call(*rows, *given, slots)
    assert same(given, caches)
    assert same(after, written(rows, caches, slots))


def test_a_loop_over_steps_writes_in_place(jax, interop):
    rows, caches, _ = random_write(7, num_tokens=8)
    slots = np.arange(24, dtype=np.int32).reshape(3, 8)

    def step(i, state):
        return interop.write_kv(rows[0] * (i + 1), rows[1], *state, jax.numpy.asarray(slots)[i])

    loop = jax.jit(lambda *caches: jax.lax.fori_loop(0, 3, step, caches), donate_argnums=(0, 1))
    given = [jax.numpy.array(cache) for cache in caches]
    before = addresses(given)
    after = loop(*given)
    assert addresses(after) == before
    expected = caches
    for i in range(3):
        expected = written([rows[0] * np.float32(i + 1), rows[1]], expected, slots[i])
    assert same(after, expected)


@pytest.mark.parametrize("is_written", [True, False])
def test_a_write_under_a_condition_by_masked_slots_or_in_a_branch(jax, interop, is_written):
    rows, caches, slots = random_write(8)

    def masked(*own, flag):
        return interop.write_kv(*rows, *own, jax.numpy.where(flag, slots, -1))

    def branch(*own, flag):
        return jax.lax.cond(flag, lambda *own: interop.write_kv(*rows, *own, slots, copy=None), lambda *own: own, *own)

    def run(step):
        given = [jax.numpy.array(cache) for cache in caches]
        before = addresses(given)
        after = jax.jit(step, donate_argnums=(0, 1))(*given, flag=is_written)
        return after, addresses(after) == before

    expected = written(rows, caches, slots) if is_written else caches
    after, is_in_place = run(masked)
    assert is_in_place
    assert same(after, expected)
    assert same(run(branch)[0], expected)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_scan_over_layers_writes_and_attends_in_stacked_caches_in_place(jax, interop, layout):
    import pagecore

    rows, caches, slots = random_write(8, num_tokens=4)
    slots = np.asarray([4, 5, 6, 7], np.int32)
    query = rows[0] + 1
    attend = {"block_table": np.asarray([[1]]), "seq_lens": [4], "cu_query_lens": [0, 4]}
    stacks = [np.stack([laid_out(cache * (i + 1), layout) for i in range(3)]) for cache in caches]

    def forward(keys, values):
        def body(state, layer):
            hidden, keys, values = state
            keys, values = interop.write_kv(
                hidden, rows[1], keys, values, slots, layer=layer, layout=layout, key_scale=0.5
            )
            out = interop.paged_attention(query, keys, values, **attend, layer=layer, layout=layout, key_scale=0.5)
            return (hidden + out[..., :16], keys, values), out

        return jax.lax.scan(body, (rows[0], keys, values), np.arange(3))

    given = [jax.numpy.array(stack) for stack in stacks]
    before = addresses(given)
    (hidden, *after), outs = jax.jit(forward, donate_argnums=(0, 1))(*given)
    assert addresses(after) == before

    expected = rows[0]
    for i in range(3):
        layer = written([expected, rows[1]], [cache * (i + 1) for cache in caches], slots, key_scale=0.5)
        assert same([stack[i] for stack in after], [laid_out(cache, layout) for cache in layer])
        out = pagecore.paged_attention(query, *layer, **attend, key_scale=0.5)
        assert np.allclose(outs[i], out, atol=1e-6)
        expected = expected + np.asarray(outs[i])[..., :16]
    assert np.allclose(hidden, expected, atol=1e-5)


def test_a_list_of_layers_is_written_in_place(jax, interop):
    rows, caches, slots = random_write(9)
    layers = [[jax.numpy.array(cache * i) for cache in caches] for i in range(3)]
    before = [addresses(layer) for layer in layers]
    step = interop.jit(lambda layers: [interop.write_kv(*rows, *layer, slots) for layer in layers], caches="layers")
    after = step(layers)
    assert [addresses(layer) for layer in after] == before
    assert all(same(got, written(rows, [cache * i for cache in caches], slots)) for i, got in enumerate(after))


def test_negative_and_missing_slots_write_nothing(jax, interop):
    rows, caches, slots = random_write(10)
    step = jax.jit(interop.write_kv)
    assert same(step(*rows, *map(jax.numpy.array, caches), np.full(9, -1)), caches)
    assert same(step(*rows, *map(jax.numpy.array, caches), slots[:3]), written(rows, caches, slots[:3]))
    assert same(step(*rows, *map(jax.numpy.array, caches), []), caches)


def test_slots_are_int64_under_x64(jax, interop):
    rows, caches, slots = random_write(11)
    with jax.enable_x64(True):
        step = jax.jit(interop.write_kv)
        arrays = [*rows, *caches, slots.astype(np.int64)]
        assert "tensor<9xi64>" in step.lower(*arrays).as_text()
        assert same(step(*arrays), written(rows, caches, slots))


def test_denormal_numbers_are_not_flushed(jax, interop):
    """XLA's threads flush denormal numbers to 0; the handlers must not."""
    rows, caches, slots = random_write(12, cache_dtype="float16")
    rows = [array * np.float32(1e-40) for array in rows]
    scales = {"key_scale": 1e-36, "value_scale": 1e-37}
    after = jax.jit(functools.partial(interop.write_kv, **scales))(*rows, *caches, slots)
    expected = written(rows, caches, slots, **scales)
    assert np.any(expected[0][slots[0] // 4, slots[0] % 4] != 0)
    assert same(after, expected)


def test_a_write_after_which_the_old_cache_is_used_raises(jax, interop):
    rows, caches, slots = random_write(13)

    def step(key_cache, value_cache):
        return interop.write_kv(*rows, key_cache, value_cache, slots), value_cache.sum()

    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"value_cache was copied.* pass copy=None"):
        jax.block_until_ready(jax.jit(step, donate_argnums=(0, 1))(*map(jax.numpy.array, caches)))


def test_a_write_outside_of_jit_raises(jax, interop):
    rows, caches, slots = random_write(14)
    with pytest.raises(UnsupportedOption, match=r"key_cache is not an argument of a function under jax\.jit"):
        interop.write_kv(*rows, *map(jax.numpy.array, caches), slots)
    closed_over = [jax.numpy.array(cache) for cache in caches]
    with pytest.raises(UnsupportedOption, match=r"key_cache is not an argument of a function under jax\.jit"):
        jax.jit(lambda: interop.write_kv(*rows, *closed_over, slots))()
