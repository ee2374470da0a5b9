"""Layers with rotated keys and values, and their twins that are given rotated rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from pagecore import AttentionSpec, PagedKVCache, hadamard
from tests.cache.caches import normal
from tests.ops.cases import DTYPES
from tests.reference.hadamard import with_outliers

HEADS, DIM, V_DIM = 2, 32, 64
SIDES = {"keys": (True, False), "values": (False, True), "both": (True, True)}
FORMATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int4_token": {"format": "int4_token"},
    "nvfp4": {"format": "nvfp4", "key_scale": 0.5},
    "float8 and 4 bits": {"format": "float8_e4m3fn", "key_scale": [0.5, 0.25], "value_format": "int4_token"},
    "kivi4": {"format": "kivi4", "residual": 5, "group_size": 16, "block_size": 16},
}


def rotated(spec: AttentionSpec, sides: str) -> AttentionSpec:
    keys, values = SIDES[sides]
    return replace(spec, key_rotation="hadamard" if keys else None, value_rotation="hadamard" if values else None)


class Pair:
    """A cache with rotations, and its twin without, to which every operation is given."""

    def __init__(self, spec: AttentionSpec, sides: str, layers: int = 2, **options: Any) -> None:
        self.keys, self.values = SIDES[sides]
        sizes = {"num_blocks": 24, "max_sequences": 6} | ({} if spec.sealing else {"block_size": 4}) | options
        self.spec = spec
        self.own = PagedKVCache(rotated(spec, sides), num_layers=layers, **sizes)
        self.twin = PagedKVCache(spec, num_layers=layers, **sizes)
        assert self.own.num_groups == self.twin.num_groups
        for cache in (self.own, self.twin):
            for pool in cache._parts.store.pools:
                for plane in pool.planes():
                    plane.numpy()[...] = 0  # memory that no step has written compares equal
        self.seed = 0

    def both(self, name: str, *arguments: Any, **options: Any) -> tuple[Any, Any]:
        """Call a method of both caches; an argument that is a pair has one for each."""
        return tuple(
            getattr(cache, name)(*(each[i] if isinstance(each, tuple) else each for each in arguments), **options)
            for i, cache in enumerate((self.own, self.twin))
        )

    def new(self, *shape: int, dtype: str = "float32") -> np.ndarray:
        self.seed += 1
        return with_outliers(normal(*shape, seed=self.seed)).astype(DTYPES[dtype])

    def step(self, *sequences: tuple[Any, Any], count: int = 1, dtype: str = "float32", **options: Any) -> np.ndarray:
        """Run a step of some sequences in both; return the output of the last layer."""
        batches = [
            cache.prepare([sequence[i] for sequence in sequences], count)
            for i, cache in enumerate((self.own, self.twin))
        ]
        tokens = count * len(sequences)
        for layer in range(self.own.num_layers):
            key, value = self.new(tokens, HEADS, DIM, dtype=dtype), self.new(tokens, HEADS, V_DIM, dtype=dtype)
            query = self.new(tokens, 4, DIM, dtype=dtype)
            before = [array.copy() for array in (key, value, query)]
            self.own.write(layer, key, value, batches[0])
            self.twin.write(layer, self.turn(key, self.keys), self.turn(value, self.values), batches[1])
            found = self.own.attend(layer, query, batches[0], **options)
            expected = self.twin.attend(layer, self.turn(query, self.keys), batches[1], **options)
            if isinstance(found, tuple):
                np.testing.assert_array_equal(found[1], expected[1])
                found, expected = found[0], expected[0]
            assert (found.dtype, found.shape) == (query.dtype, (tokens, 4, V_DIM))
            np.testing.assert_array_equal(found, self.turn(expected, self.values))
            for array, copy in zip((key, value, query), before, strict=True):
                np.testing.assert_array_equal(array, copy)  # those of the caller are not changed
        for i, cache in enumerate((self.own, self.twin)):
            cache.commit(batches[i])
        return found

    @staticmethod
    def turn(rows: np.ndarray, applies: bool) -> np.ndarray:
        return hadamard(rows) if applies else rows

    def check(self) -> None:
        """Compare every byte of both, and their recounts."""
        for pools in zip(self.own._parts.store.pools, self.twin._parts.store.pools, strict=True):
            for mine, other in zip(*(pool.planes() for pool in pools), strict=True):
                np.testing.assert_array_equal(mine.numpy().view(np.uint8), other.numpy().view(np.uint8))
        for cache in (self.own, self.twin):
            cache.check_invariants()


def spec_of(**options: Any) -> AttentionSpec:
    return AttentionSpec(HEADS, DIM, V_DIM, dtype="float32", num_query_heads=4, **options)
