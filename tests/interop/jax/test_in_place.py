"""pagecore.interop.jax.jit updates caches in place, or raises with the reason for a copy."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import pagecore
from pagecore.errors import UnsupportedOption
from tests.interop.jax.on_jax import random_write, same, written

ROOT = Path(__file__).parents[3]


@pytest.fixture
def step(interop):
    @interop.jit(caches=("key_cache", "value_cache"))
    def write(key, value, key_cache, value_cache, slots):
        return interop.write_kv(key, value, key_cache, value_cache, slots)

    return write


def test_steps_write_to_the_same_memory(jax, step):
    rows, caches, _ = random_write(1)
    given = [jax.numpy.array(cache) for cache in caches]
    before = [cache.unsafe_buffer_pointer() for cache in given]
    for seed in range(5):
        rows, _, slots = random_write(seed)
        given = step(*rows, *given, slots)
        caches = written(rows, caches, slots)
    assert [cache.unsafe_buffer_pointer() for cache in given] == before
    assert same(given, caches)


def test_caches_are_found_by_position_and_by_name(jax, interop):
    rows, caches, slots = random_write(2)

    def function(slots, *rows, keys, values):
        return interop.write_kv(*rows, keys, values, slots)

    step = interop.jit(function, caches=("keys", "values"))
    keys, values = map(jax.numpy.array, caches)
    assert same(step(slots, *rows, keys=keys, values=values), written(rows, caches, slots))
    assert keys.is_deleted()
    assert step.__name__ == "function"
    assert "pagecore_write_kv" in step.jitted.lower(slots, *rows, keys=caches[0], values=caches[1]).as_text()


def test_a_cache_in_memory_of_pagecore_raises_and_is_unchanged(jax, interop, step):
    rows, caches, slots = random_write(3)
    tensors = [pagecore.zeros(cache.shape) for cache in caches]
    with pytest.raises(UnsupportedOption, match=r"key_cache \(float32\[6, 4, 2, 16\]\) was copied.* not own"):
        step(*rows, *map(interop.as_jax, tensors), slots)
    assert not any(tensor.numpy().any() for tensor in tensors)


def test_a_cache_that_another_object_views_raises(jax, step):
    rows, caches, slots = random_write(4)
    given = [jax.numpy.array(cache) for cache in caches]
    view = pagecore.as_tensor(given[1])
    with pytest.raises(UnsupportedOption, match=r"value_cache .* was copied, because .* another object views"):
        step(*rows, *given, slots)
    assert same([view.numpy()], [caches[1]])


def test_a_cache_of_numpy_raises(step):
    rows, caches, slots = random_write(5)
    with pytest.raises(UnsupportedOption, match=r"key_cache .* was copied"):
        step(*rows, *caches, slots)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_cache_that_is_not_returned_raises(jax, interop):
    rows, caches, slots = random_write(6)
    step = interop.jit(lambda keys, values: interop.write_kv(*rows, keys, values, slots)[0], caches=("keys", "values"))
    with pytest.raises(UnsupportedOption, match=r"values .* was copied, because the function does not return it"):
        step(*map(jax.numpy.array, caches))


def test_a_deleted_cache_raises_in_jax(jax, step):
    rows, caches, slots = random_write(7)
    given = [jax.numpy.array(cache) for cache in caches]
    step(*rows, *given, slots)
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        step(*rows, *given, slots)


def test_inside_another_jit_only_the_outer_one_checks(jax, interop, step):
    rows, caches, slots = random_write(8)
    outer = interop.jit(lambda keys, values: step(*rows, keys, values, slots), caches=("keys", "values"))
    assert same(outer(*map(jax.numpy.array, caches)), written(rows, caches, slots))


def test_unknown_names_and_options_of_donation_raise(interop):
    with pytest.raises(
        UnsupportedOption, match=r"caches lists 'cache', which is not an argument of the function; .* \['keys'\]"
    ):
        interop.jit(lambda keys: keys, caches="cache")
    with pytest.raises(UnsupportedOption, match="donate_argnums is not supported; list donated arguments in caches="):
        interop.jit(lambda keys: keys, caches="keys", donate_argnums=0)


SHARDED = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import pagecore
from pagecore.interop import jax as interop

mesh = jax.make_mesh((2,), ("heads",))
cache_spec, rows_spec = P(None, None, "heads", None), P(None, "heads", None)

@functools.partial(interop.jit, caches=("keys", "values"))
@functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(cache_spec, cache_spec, rows_spec, rows_spec),
    out_specs=(cache_spec, cache_spec, rows_spec), check_vma=False,
)
def step(keys, values, new, query):
    keys, values = interop.write_kv(new, new, keys, values, jnp.arange(4, 7))
    return keys, values, interop.paged_attention(query, keys, values, [[1]], [3])

put = lambda array, spec: jax.device_put(array, NamedSharding(mesh, spec))
rng = np.random.default_rng(0)
new, query = (rng.standard_normal((n, 4, 8)).astype(np.float32) for n in (3, 1))
keys, values = (put(jnp.zeros((4, 4, 4, 8)), cache_spec) for _ in range(2))
where = [shard.data.unsafe_buffer_pointer() for shard in keys.addressable_shards]
for _ in range(2):
    keys, values, out = step(keys, values, put(new, rows_spec), put(query, rows_spec))
assert [shard.data.unsafe_buffer_pointer() for shard in keys.addressable_shards] == where
caches = [np.zeros((4, 4, 4, 8), np.float32) for _ in range(2)]
pagecore.write_kv(new, new, *caches, [4, 5, 6])
assert np.array_equal(np.asarray(out), pagecore.paged_attention(query, *caches, [[1]], [3]))
print(len(keys.addressable_shards), out.sharding.spec)
"""


def test_shard_map_over_heads(interop):
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-c", SHARDED], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("2 ")
