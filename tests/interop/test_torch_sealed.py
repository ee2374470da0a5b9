"""torch operators over sealed blocks: opcheck, parity with pagecore's own functions, compiled graphs, and refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pagecore import AttentionSpec, PagedKVCache, SealedBlocks, ops
from pagecore.errors import InvalidBlock, ShapeError, UnsupportedDtype, UnsupportedOption
from tests.interop.steps import compile_whole, torch
from tests.ops.cases import Shape
from tests.ops.sealed_cases import empty_sealed, make_sealed_case

import pagecore.interop.torch as interop  # isort: skip  # after steps, which skips where torch is missing

# Raised by a module of torch that inductor imports.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
SHAPE = Shape((70, 33), (3, 1), heads=(4, 2), dims=(16, 32))


def case() -> tuple[list[Any], SealedBlocks, dict[str, Any]]:
    """Return the arrays of a call, its sealed blocks, and its options."""
    made = make_sealed_case(SHAPE, (2, 4), (16, 16))
    options = {name: torch.from_numpy(np.asarray(each)) for name, each in made.plain.options.items()}
    return [*map(torch.from_numpy, made.plain.arrays)], SealedBlocks(*map(torch.from_numpy, made.sealed)), options


def caches() -> tuple[Any, Any, SealedBlocks]:
    key, value = (torch.from_numpy(np.random.default_rng(dim).normal(size=(4, 16, 2, dim))) for dim in (16, 32))
    sealed = SealedBlocks(*map(torch.from_numpy, empty_sealed(6, (16, 2, 16, 32), (2, 4), (16, 16))[:4]))
    return key.float(), value.bfloat16(), sealed


def test_operators_pass_opcheck():
    arrays, sealed, options = case()
    named = {f"sealed_{name}": each for name, each in sealed._asdict().items()}
    torch.library.opcheck(torch.ops.pagecore.paged_attention.default, arrays, options | named)
    key, value, target = caches()
    # Poisoned scales are NaN, which opcheck finds unequal.
    target = SealedBlocks(*(torch.zeros_like(plane) for plane in target[:4]))
    pairs = torch.tensor([[1, 5], [3, 2]])
    torch.library.opcheck(torch.ops.pagecore.seal_kv.default, (key, value, *target[:4], pairs))
    torch.library.opcheck(torch.ops.pagecore.unseal_kv.default, (*sealed[:4], *arrays[1:3], torch.tensor([[1, 2]])))


def test_attention_equals_that_of_pagecore():
    arrays, sealed, options = case()
    expected = ops.paged_attention(*arrays, sealed=sealed, **options, return_lse=True)
    found = interop.paged_attention(*arrays, sealed=sealed, **options, return_lse=True)
    assert all(map(torch.equal, found, expected))
    out = torch.full_like(expected[0], torch.nan)
    lengths = arrays[4]
    plan = interop.plan_attention(
        options["cu_query_lens"], lengths, num_query_heads=4, num_kv_heads=2, num_tokens=len(out)
    )
    interop.paged_attention(*arrays, sealed=sealed, **options, out=out, plan=plan)
    assert torch.equal(out, expected[0])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_graph_seals_and_reads(backend):
    arrays, sealed, options = case()

    def step(query, key, value, table, lens, sealed, pairs, restored):
        interop.seal_kv(key, value, sealed, pairs)
        interop.unseal_kv(sealed, *restored, pairs.flip(1))
        return interop.paged_attention(query, key, value, table, lens, sealed=sealed, **options)

    # Block 1 of the plain caches becomes a sealed block that no sequence has.
    unused = next(block for block in range(1, len(sealed.key)) if block not in sealed.block_table)
    pairs = torch.tensor([[1, unused]])
    arrays[1][1], arrays[2][1] = 0.5, torch.arange(32).float()
    twin = SealedBlocks(*(each.clone() for each in sealed))
    restored, theirs = ([torch.full_like(each, torch.nan) for each in arrays[1:3]] for _ in range(2))
    found = compile_whole(step, backend)(*arrays, sealed, pairs, restored)
    assert torch.equal(found, step(*arrays, twin, pairs, theirs))
    for mine, other in zip(restored, theirs, strict=True):
        assert torch.equal(mine[1], other[1])
        assert (mine[1] - 0.5).abs().max() < 32
        assert torch.isnan(mine[2:]).all()
    assert torch.equal(sealed.value[unused], twin.value[unused])
    assert (sealed.key[unused] == 0).all()


def test_sealed_bytes_equal_those_of_pagecore():
    key, value, ours = caches()
    theirs = SealedBlocks(*(each.clone() for each in ours[:4]))
    for pairs in (torch.tensor([[1, 5], [3, 2]]), torch.tensor([[2, 1]], dtype=torch.int32)):
        interop.seal_kv(key, value, ours, pairs)
        ops.seal_kv(key, value, theirs, pairs)
    for found, expected in zip(ours[:4], theirs[:4], strict=True):
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_restored_numbers_equal_those_of_pagecore():
    key, value, sealed = caches()
    interop.seal_kv(key, value, sealed, torch.tensor([[1, 5], [3, 2]]))
    ours, theirs = ([torch.full_like(each, torch.nan) for each in (key, value)] for _ in range(2))
    for pairs in (torch.tensor([[5, 3]]), torch.tensor([[2, 1]], dtype=torch.int32)):
        interop.unseal_kv(sealed, *ours, pairs)
        ops.unseal_kv(sealed, *theirs, pairs)
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(found[1::2], expected[1::2])
        assert torch.isnan(found[::2]).all()


def test_refusals():
    arrays, sealed, options = case()
    key, value, target = caches()
    pairs = torch.tensor([[1, 5]])
    with pytest.raises(UnsupportedOption, match="sealed is 0; pass a SealedBlocks"):
        interop.paged_attention(*arrays, sealed=0, **options)
    with pytest.raises(UnsupportedOption, match="sealed is None; pass a SealedBlocks"):
        interop.seal_kv(key, value, None, pairs)
    with pytest.raises(UnsupportedDtype, match="sealed_key is a numpy"):
        interop.paged_attention(*arrays, sealed=sealed._replace(key=sealed.key.numpy()), **options)
    with pytest.raises(UnsupportedDtype, match="sealed_value is a list; expected"):
        interop.seal_kv(key, value, target._replace(value=[1]), pairs)
    with pytest.raises(UnsupportedDtype, match="pairs is a list"):
        interop.seal_kv(key, value, target, [(1, 5)])
    with pytest.raises(ShapeError, match="key_cache has shape"):
        interop.seal_kv(key[0], value, target, pairs)
    before = key.clone(), value.clone()
    for sources, targets, moved, error, message in (
        (None, (key, value), pairs, UnsupportedOption, "sealed is None; pass a SealedBlocks"),
        (target._replace(key_scale=0), (key, value), pairs, UnsupportedDtype, "sealed_key_scale is a int; expected"),
        (target, (key, [1]), pairs, UnsupportedDtype, "value_cache is a list; expected"),
        (target, (key, value), pairs[0], ShapeError, "pairs has shape"),
        (target, (key[0], value), pairs, ShapeError, "key_cache has shape"),
        (target, (key, value), torch.tensor([[6, 1]]), InvalidBlock, "6"),
        (target, (key, value), torch.tensor([[1, 2], [3, 2]]), InvalidBlock, "plain block 2 twice"),
    ):
        with pytest.raises(error, match=message):
            interop.unseal_kv(sources, *targets, moved)
    assert torch.equal(key, before[0])
    assert torch.equal(value, before[1])


def test_an_operator_reads_the_sealed_blocks_of_a_cache():
    spec = AttentionSpec(2, 32, dtype="bfloat16", num_query_heads=4, format="kivi2", residual=20)
    cache = PagedKVCache(spec, num_blocks=8, max_sequences=2)
    sequence = cache.add_sequence(range(90))
    for count in (80, 1):
        rows = [torch.randn(count, heads, 32, dtype=torch.bfloat16) for heads in (2, 2, 4)]
        batch = cache.prepare([sequence], count)
        cache.write(0, *rows[:2], batch)
        group = batch.group(0)
        planes = [interop.as_torch(plane) for plane in cache.sealed_planes(0)[:4]]
        tables = [interop.as_torch(each, read_only=True) for each in (group.block_table, group.sealed.block_table)]
        lens, seq_lens, row, starts = map(
            interop.as_torch, (group.sealed.lens, batch.seq_lens, batch.rows, batch.cu_query_lens)
        )
        found = interop.paged_attention(
            rows[2], *(interop.as_torch(cache.plane(name, 0)) for name in ("key", "value")), tables[0], seq_lens,
            rows=row, cu_query_lens=starts, sealed=SealedBlocks(*planes, tables[1], lens),
        )  # fmt: skip
        assert torch.equal(found, cache.attend(0, rows[2], batch))
        cache.commit(batch)
    assert sequence.num_sealed_tokens == 32
    with pytest.raises(UnsupportedOption, match="layer 0 has no sealed blocks; make its spec with"):
        PagedKVCache(AttentionSpec(2, 32), num_blocks=8).sealed_planes(0)
