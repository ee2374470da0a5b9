"""Layers with sealed blocks: their specs, the sizes of their caches, and what is refused."""

from dataclasses import replace

import pytest

from pagecore import (
    AttentionSpec,
    CrossSpec,
    PagedCacheConfig,
    PagedKVCache,
    ShapeError,
    StaticKVCache,
    TensorParallel,
    UnsupportedOption,
    make_cache,
)
from pagecore.serving import plan_memory
from tests.together import together

BLOCK, RESIDUAL = 32, 40
SPEC = AttentionSpec(2, 64, 32, dtype="float32", num_query_heads=4, format="kivi2", residual=RESIDUAL)


def test_a_memory_is_divided_by_what_both_groups_need():
    cache = PagedKVCache(SPEC, num_layers=4, block_size=BLOCK, memory="64MiB", max_tokens_per_sequence=4096)
    sealed, tail = cache.num_blocks
    assert sealed > 4 * tail
    spec_bytes = [sum(plane.nbytes for plane in SPEC.planes), sum(p.nbytes for p in SPEC.tail.planes) * BLOCK]
    assert cache.nbytes == 4 * sum(n * size for n, size in zip(cache.num_blocks, spec_bytes, strict=True))
    assert 0.9 * 2**26 < cache.nbytes <= 2**26


def test_the_block_size_follows_from_the_spec():
    for block in (32, 64):
        spec = replace(SPEC, block_size=block)
        assert PagedKVCache([AttentionSpec(1, 64), spec], num_blocks=4).block_size == block
        assert make_cache(PagedCacheConfig(num_blocks=4), spec).block_size == block
        assert plan_memory(spec, "1MiB").block_size == block
        with pytest.raises(ShapeError, match=f"block_size is 16, .* blocks of {block} tokens"):
            make_cache(PagedCacheConfig(block_size=16, num_blocks=4), spec)
    assert PagedKVCache(AttentionSpec(1, 64), num_blocks=4).block_size == 16
    with pytest.raises(ShapeError, match=r"blocks of 32 and 64 tokens, .* the same block_size"):
        PagedKVCache([SPEC, replace(SPEC, block_size=64)], num_blocks=4)


def test_ranks_share_heads():
    part = TensorParallel(1, 2).shard(SPEC)
    assert (part.num_kv_heads, part.num_query_heads, part.residual, part.format) == (1, 2, RESIDUAL, "kivi2")
    assert PagedKVCache(SPEC, block_size=BLOCK, num_blocks=4, parallel=TensorParallel(1, 2)).num_groups == 2


def test_planes_of_equal_shapes_and_other_dims_or_bits_are_in_groups_of_their_own():
    layers = [AttentionSpec(2, 64, 32, format="kivi2"), AttentionSpec(2, 32, 32, format="kivi4", value_format="kivi2")]
    small = replace(layers[1], group_size=16)
    cache = PagedKVCache([layers[0], small, layers[1]], block_size=BLOCK, num_blocks=9, device="none")
    assert len({cache.group_of(layer) for layer in range(3)}) == 3


def test_layers_seal_together_after_the_largest_residual():
    layers = [replace(SPEC, residual=residual, format=name) for residual, name in ((0, "kivi2"), (70, "kivi4"))]
    sizes = {"memory": "4MiB", "max_tokens_per_sequence": 512}
    for order in (layers, layers[::-1]):
        cache = PagedKVCache([*order, AttentionSpec(2, 64, window=9)], **sizes)
        sequence = cache.add_sequence(range(400))
        for count in (100, 33, 200):
            cache.commit(cache.prepare([sequence], count))
            sealed = (sequence.num_computed_tokens - 70) // BLOCK * BLOCK
            assert sequence.num_sealed_tokens == sealed
            assert [cache.held_from(sequence, group) for group in (3, 4)] == [sealed, sealed]
        assert cache.held_from(sequence, 2) == (sealed - 8) // BLOCK * BLOCK
        assert cache.num_blocks[3] == cache.num_blocks[4]
    same = PagedKVCache([replace(SPEC, residual=70), layers[1], AttentionSpec(2, 64, window=9)], **sizes)
    assert same.num_blocks == PagedKVCache([*layers, AttentionSpec(2, 64, window=9)], **sizes).num_blocks


def test_another_format_replaces_a_sealed_one():
    spec = AttentionSpec(2, 64, format="kivi2")
    assert replace(spec, format="int8_token") == AttentionSpec(2, 64, format="int8_token")
    assert replace(spec, group_size=64).sealing.block_size == 64


def test_bytes_of_the_formats():
    for name, bits in (("kivi2", 3), ("kivi4", 5)):
        spec = AttentionSpec(8, 128, format=name)
        assert sum(plane.nbytes for plane in spec.planes) * 8 == 2 * 32 * 8 * 128 * bits
        assert (spec.sealing.residual, spec.sealing.group_size, spec.sealing.block_size) == (128, 32, 32)
        assert spec.tail.window == 129
        assert spec.with_format(None) == AttentionSpec(8, 128)


WRONG = {
    "bounds": ({"key_bounds": True}, UnsupportedOption, "key_bounds is given, but format 'kivi2'"),
    "labels": ({"label_channels": [[0], [1]]}, UnsupportedOption, "label_channels is given"),
    "a factor": ({"key_scale": 2.0}, UnsupportedOption, "computes its scales"),
    "plain values": ({"value_format": "int8_token"}, UnsupportedOption, "use one of them for both"),
    "plain keys": ({"format": None, "value_format": "kivi4"}, UnsupportedOption, "keys have format None"),
    "a lookahead": ({"lookahead": 9, "residual": 8}, ShapeError, "residual of at least the lookahead"),
    "a residual": ({"residual": -1}, ShapeError, "residual is -1"),
    "a group": ({"group_size": 8}, ShapeError, "group_size is 8"),
    "a block": ({"block_size": 40}, ShapeError, "block_size is 40, not a multiple of group_size, 32"),
    "a dim": ({"head_dim": 72}, ShapeError, "head_dim is 72"),
    "a value dim": ({"v_head_dim": 48}, ShapeError, "v_head_dim is 48, not a multiple of group_size"),
    "no format": ({"format": "int8_token", "residual": 64}, UnsupportedOption, "residual is 64, but only"),
}


@together("name", WRONG)
def test_specs_that_cannot_be_sealed_are_refused(name):
    options, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        AttentionSpec(**{"num_kv_heads": 2, "head_dim": 64, "format": "kivi2", **options})


def test_caches_that_cannot_be_served_are_refused():
    with pytest.raises(ShapeError, match="block_size is 16, but the AttentionSpec is made for blocks of 32 tokens"):
        PagedKVCache(SPEC, block_size=16, num_blocks=9)
    with pytest.raises(UnsupportedOption, match=r"layer 0 has the format 'kivi2', .* use a PagedKVCache, or another"):
        StaticKVCache(SPEC, max_length=64)
    with pytest.raises(UnsupportedOption, match="an encoder's output never grows"):
        CrossSpec(2, 64, format="kivi2")
