"""The method of a paged cache that compacts a sequence."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from pagecore.cache.lifecycle._lifecycle import compact
from pagecore.cache.lifecycle.slot_moves import slot_moves
from pagecore.cache.parts import PartsOwner
from pagecore.cache.sequences._sequences import Sequence
from pagecore.errors import ShapeError


class CompactMethods(PartsOwner):
    """`PagedKVCache.compact`."""

    def compact(self, sequence: Sequence, keep: ArrayLike | Iterable[ArrayLike]) -> None:
        """Keep some computed tokens of a sequence, move them together and free the blocks of the others.

        The kept tokens become tokens 0 to n - 1 of the sequence in the cache, in every plane of every layer, and
        `num_tokens`, `num_computed_tokens` and `seq_lens` shrink. Positions do not: rotary embeddings are applied
        before the write and stay with the tokens, and the next token has position ``num_computed_tokens +
        num_dropped_tokens``, which `prepare` writes to ``batch.positions``. Causality still holds; ALiBi and windows
        would count the wrong distances.

        Blocks that the prefix cache or a fork shares are never written: the sequence takes new ones. What it shares in
        front of the first moved token stays shared; later blocks are never published again. A compacted sequence can
        be forked and swapped; `truncate` accepts 0, which forgets the compaction, and lengths from n on. On CUDA the
        tokens move on the stream of the last step.

        Kept tokens of sealed blocks (format "kivi2" or "kivi4") are restored, and whole blocks of them are sealed
        again, but for the newest `residual` tokens. A sealed block that is kept whole and lands on a multiple of the
        block size is copied; among the newest `residual` tokens only if all blocks before it are sealed. The keys of
        other blocks are quantised twice. These groups take new blocks for all tokens from the first that moves on, and
        memory for a part of the tokens of one layer.

        Parameters
        ----------
        sequence : Sequence
            A sequence without a step in flight.
        keep : integers, [n], or one [n] for each group
            Ascending positions 0 to ``num_computed_tokens - 1`` in the cache: one list for all heads of all layers, or
            a list of one list for each group. The ids of the sequence are those of group 0. The list of a tail is that
            of its sealed blocks.

        Raises
        ------
        ShapeError
            `keep` does not ascend, is out of range, or has other numbers of positions for other groups.
        OutOfBlocks
            The shared blocks that would be written cannot be replaced, or new blocks of sealed groups are short. After
            every error nothing was changed, except that cached blocks may have been evicted.
        InvalidSequence
            A sequence that is not of this cache, in flight or swapped out.
        UnsupportedOption
            A cache with windows or with ``scrub=True``, or planes per block other than the bounds of plain keys.
        DeviceError
            The stream of a cache on CUDA is being captured. Or the device failed while tokens moved, which loses them.

        Notes
        -----
        Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024. Zhang et al., "H2O:
        Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", 2023.

        Examples
        --------
        >>> import pagecore
        >>> cache = pagecore.PagedKVCache(pagecore.AttentionSpec(2, 64), block_size=4, num_blocks=8, device="none")
        >>> sequence = cache.add_sequence(tokens=range(8))
        >>> cache.commit(cache.prepare([sequence], [8]))
        >>> cache.compact(sequence, [0, 1, 2, 6, 7])
        >>> sequence.tokens.tolist(), sequence.num_dropped_tokens
        ([0, 1, 2, 6, 7], 3)
        """
        compact(
            self._parts.state,
            sequence,
            _by_group(keep, self._parts.tables.num_groups),
            partial(slot_moves, self._parts),
        )


def _by_group(keep: ArrayLike | Iterable[ArrayLike], num_groups: int) -> list[ArrayLike]:
    """Return one list for all groups, or one for each."""
    given: Any = (
        keep
        if isinstance(keep, list | tuple) or hasattr(keep, "ndim") or not isinstance(keep, Iterable)
        else list(keep)
    )
    try:
        is_nested = isinstance(given, list | tuple) and len(given) > 0 and np.ndim(given[0]) > 0
        if not is_nested and np.ndim(given) < 2:
            return [given]
    except ValueError:
        raise ShapeError(
            "keep holds lists of unequal depth; give positions, or one list of positions for each group"
        ) from None
    listed = list(given)
    if len(listed) != num_groups:
        raise ShapeError(f"keep has {len(listed)} lists; give one for all groups, or one for each of {num_groups}")
    return listed
