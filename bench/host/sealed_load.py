"""Keys and values of a paged load in sealed blocks of 2 or 4 bits, and the newest tokens of each sequence plain."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.harness.arrays import huge_empty
from bench.harness.runner import Work
from bench.host.attention_load import Paged
from pagecore import SealedBlocks, paged_attention, seal_kv
from pagecore.arrays.dtypes.formats import SEALED_FORMATS

# Values of KIVI: tokens of a block and of a group of keys, channels of a group of values, and the newest tokens.
BLOCK, GROUP, RESIDUAL = 32, 32, 128


def plane_shapes(blocks: int, heads: int, dim: int, bits: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the planes of sealed blocks, by the names of `SealedBlocks`."""
    return {
        "key": (blocks, heads, BLOCK * bits // 32, dim),
        "value": (blocks, BLOCK, heads, dim * bits // 32),
        "key_scale": (blocks, heads, BLOCK // GROUP, 2, dim),
        "value_scale": (blocks, BLOCK, heads, dim // GROUP, 2),
    }


class Sealed:
    """A load in blocks of `BLOCK` tokens, sealed but for the last `RESIDUAL` tokens of each sequence.

    Attributes
    ----------
    name : str
        "kivi2" or "kivi4".
    bits : int
        Bits of a code.
    block_size : int
    nbytes : int
        Bytes of words and scales, and of the newest tokens.
    """

    def __init__(self, paged: Paged, name: str) -> None:
        self.name, self.bits, self.block_size = name, SEALED_FORMATS[name], BLOCK
        self._paged = paged
        blocks, _, heads, dim = paged.key_cache.shape
        shapes = plane_shapes(blocks, heads, dim, self.bits)
        planes = {side: huge_empty(shape, "bfloat16" if "scale" in side else "int32") for side, shape in shapes.items()}
        whole = paged.table[:, : (int(paged.seq_lens[0]) - RESIDUAL) // BLOCK]
        lens = np.full(len(whole), whole.shape[1] * BLOCK, np.int32)
        self._sealed = SealedBlocks(**planes, block_table=whole, lens=lens)
        seal_kv(paged.key_cache, paged.value_cache, self._sealed, np.repeat(whole.reshape(-1, 1), 2, axis=1))
        newest = paged.seq_lens.sum() - lens.sum()
        self.nbytes = sum(plane[0].nbytes for plane in planes.values()) * whole.size
        self.nbytes += int(newest) * (paged.key_cache[0, 0].nbytes + paged.value_cache[0, 0].nbytes)

    @property
    def arrays(self) -> list[np.ndarray]:
        """Return the planes of the sealed blocks."""
        return list(self._sealed[:4])

    def attend(self, arrays: list[np.ndarray], query: np.ndarray, out: np.ndarray, **options: Any) -> Work:
        """Return a call of attention over planes, which are `arrays` or copies, into `out`."""
        paged = self._paged
        inputs = (query, paged.key_cache, paged.value_cache, paged.table, paged.seq_lens)
        key, value, key_scale, value_scale = arrays
        sealed = self._sealed._replace(key=key, value=value, key_scale=key_scale, value_scale=value_scale)
        return lambda: paged_attention(*inputs, sealed=sealed, out=out, **options)
