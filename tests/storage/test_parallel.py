"""TensorParallel: the heads of a model that a rank holds."""

import pickle

import numpy as np
import pytest

from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from pagecore.storage import AttentionSpec, Plane, TensorParallel
from tests.together import together


@pytest.mark.parametrize(("heads", "size"), [(32, 1), (32, 4), (8, 8), (8, 2), (1, 1), (6, 3), (5, 5)])
def test_heads_are_split_over_ranks_in_order(heads, size):
    held = [TensorParallel(rank, size).heads(heads) for rank in range(size)]
    assert [head for part in held for head in part] == list(range(heads))
    assert {len(part) for part in held} == {heads // size}


@pytest.mark.parametrize(("heads", "size"), [(2, 4), (1, 8), (3, 6), (8, 16)])
def test_more_ranks_than_heads_replicate_the_heads(heads, size):
    held = [list(TensorParallel(rank, size).heads(heads)) for rank in range(size)]
    assert held == [[rank * heads // size] for rank in range(size)]


@pytest.mark.parametrize(("heads", "size"), [(32, 3), (8, 12), (2, 3), (6, 4), (4, 6)])
def test_heads_that_ranks_can_neither_split_nor_replicate_are_refused(heads, size):
    for rank in range(size):
        with pytest.raises(ShapeError, match=f"num_kv_heads is {heads}, which {size} ranks"):
            TensorParallel(rank, size).heads(heads)


@together(
    ("query_heads", "kv_heads", "size"),
    [(8, 2, 1), (8, 2, 2), (8, 2, 4), (8, 2, 8), (64, 8, 16), (6, 2, 6), (4, 4, 4), (12, 4, 2), (3, 1, 3), (24, 2, 4)],
)
def test_a_rank_holds_query_heads_with_the_key_head_that_they_read(query_heads, kv_heads, size):
    group = query_heads // kv_heads
    for rank in range(size):
        parallel = TensorParallel(rank, size)
        part = parallel.shard(AttentionSpec(kv_heads, 8, num_query_heads=query_heads))
        keys, queries = parallel.heads(kv_heads), parallel.query_heads(query_heads)
        assert (part.num_kv_heads, part.num_query_heads) == (len(keys), len(queries))
        for own, head in enumerate(queries):
            assert keys[own // (len(queries) // len(keys))] == head // group


def test_a_shard_keeps_all_but_heads_and_slices_the_sinks():
    whole = AttentionSpec(4, 64, 32, "float16", window=7, num_query_heads=8, scale=0.3, softcap=5.0, sinks=range(8))
    part = TensorParallel(1, 2).shard(whole)
    assert part == AttentionSpec(
        2, 64, 32, "float16", window=7, num_query_heads=4, scale=0.3, softcap=5.0, sinks=[4, 5, 6, 7]
    )
    assert whole.sinks == tuple(range(8))


def test_sinks_give_the_query_heads_if_the_spec_does_not():
    part = TensorParallel(3, 4).shard(AttentionSpec(2, 8, sinks=range(8)))
    assert (part.num_kv_heads, part.num_query_heads, part.sinks) == (1, None, (6.0, 7.0))
    assert TensorParallel(3, 4).shard(AttentionSpec(2, 8)).num_query_heads is None


def test_query_heads_that_ranks_cannot_split_are_refused():
    for spec in (AttentionSpec(2, 8, num_query_heads=4), AttentionSpec(2, 8, sinks=range(4))):
        with pytest.raises(ShapeError, match="num_query_heads is 4, which 8 ranks"):
            TensorParallel(0, 8).shard(spec)


class Latent:
    """A user-defined spec with planes and a window only."""

    window = None
    planes = (Plane("latent", (1, 576), "bfloat16"),)


class Shared(Latent):
    def shard(self, parallel):
        return self


class Wrong(Latent):
    def shard(self, parallel):
        return "nothing"


def test_a_spec_that_cannot_be_split_is_refused_by_name():
    one, two = TensorParallel(), TensorParallel(1, 2)
    latent, shared = Latent(), Shared()
    assert one.shard(latent) is latent
    assert two.shard(shared) is shared
    with pytest.raises(UnsupportedOption, match="Latent cannot be split over 2 ranks"):
        two.shard(latent)
    with pytest.raises(UnsupportedOption, match="shard of Wrong returned 'nothing'"):
        two.shard(Wrong())
    for parallel in (one, two):
        with pytest.raises(UnsupportedOption, match="spec is None"):
            parallel.shard(None)


@together(
    ("rank", "size"), [(-1, 2), (2, 2), (0, 0), (0, -1), (1, 1), (0.5, 2), (0, 2.0), (None, 2), ("0", 1), (2**70, 2)]
)
def test_an_invalid_rank_is_refused(rank, size):
    with pytest.raises(ShapeError):
        TensorParallel(rank, size)


@pytest.mark.parametrize("heads", [0, -4, 1.5, None, "8"])
def test_an_invalid_number_of_heads_is_refused(heads):
    for ask in (TensorParallel(0, 2).heads, TensorParallel(0, 2).query_heads):
        with pytest.raises(ShapeError, match="heads is"):
            ask(heads)


def test_ranks_are_values():
    one = TensorParallel(np.int64(1), np.int32(4))
    assert one == TensorParallel(rank=1, size=4) == pickle.loads(pickle.dumps(one))
    assert hash(one) == hash(TensorParallel(1, 4))
    assert type(one.rank) is int
    assert TensorParallel() == TensorParallel(0, 1)
    with pytest.raises(AttributeError):
        one.rank = 2


def test_a_spec_with_another_dtype_is_otherwise_equal():
    spec = AttentionSpec(4, 64, 32, window=7, num_query_heads=8, softcap=5.0, sinks=range(8))
    other = spec.with_dtype(np.float16)
    assert other == AttentionSpec(4, 64, 32, "float16", window=7, num_query_heads=8, softcap=5.0, sinks=range(8))
    assert other.with_dtype("bfloat16") == spec
    with pytest.raises(UnsupportedDtype, match="int8"):
        spec.with_dtype("int8")
