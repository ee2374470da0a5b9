"""The methods of a paged cache that prepare, compute, commit and abandon a step."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Listed
from functools import partial
from typing import Any

from numpy.typing import ArrayLike

from pagecore.cache.lifecycle.slot_moves import slot_moves
from pagecore.cache.parts import PartsOwner
from pagecore.cache.sequences._sequences import Sequence
from pagecore.cache.step._step import abandon_steps, take_step
from pagecore.cache.step.batch import Batch, own_step
from pagecore.cache.step.prepare import new_batch, ready, refusal, save_checkpoints
from pagecore.cache.step.run import attend_step, write_step
from pagecore.errors import UnsupportedOption
from pagecore.storage.checks import ceil_div, require_int


class StepMethods(PartsOwner):
    """The methods of `PagedKVCache` that a forward pass calls, from `prepare` to `commit`."""

    def make_batch(
        self,
        max_sequences: int | None = None,
        max_tokens: int | None = None,
        max_cross_tokens: int = 0,
        *,
        max_tree_tokens: int = 0,
    ) -> Batch:
        """Return a reusable batch at fixed addresses; by default for `max_sequences` of the cache, one token each.

        `max_cross_tokens` is the number of encoder tokens that a step can write; 0 for steps that only attend to them.
        `max_tree_tokens` is the largest number of new tokens of a sequence in a step with `parents`; 0: no trees.
        """
        limit = self._parts.tables.max_sequences
        rows = limit if max_sequences is None else require_int("max_sequences", max_sequences, max=None)
        tokens = rows if max_tokens is None else require_int("max_tokens", max_tokens, max=None)
        words = ceil_div(require_int("max_tree_tokens", max_tree_tokens, min=0, max=None), 64)
        cross_tokens = require_int("max_cross_tokens", max_cross_tokens, min=0, max=None)
        if cross_tokens and self._parts.cross is None:
            raise UnsupportedOption(
                f"max_cross_tokens is {cross_tokens}, but the cache has no cross-attention layers; leave it out"
            )
        return new_batch(self._parts, rows, tokens, cross_tokens, tree_words=words)

    def prepare(
        self,
        sequences: Listed[Sequence],
        counts: ArrayLike,
        out: Batch | None = None,
        *,
        parents: Listed[ArrayLike | None] | None = None,
        draft_ids: Listed[ArrayLike | None] | None = None,
        stream: object = None,
    ) -> Batch:
        """Take the blocks of the next tokens of each sequence, copy on write, and fill a batch; all or nothing.

        Parameters
        ----------
        sequences : list of Sequence
        counts : int or list of int
            New tokens of each sequence: one number for all, or one for each. Their ids need not be known yet.
        out : Batch, optional
            A batch from `make_batch`; by default a new batch of exactly the required size.
        parents : list of (integers or None), optional
            The new tokens of each sequence as a tree of drafts: for each token the index of its parent among them, less
            than its own, or -1; None for a chain. ``batch.positions`` then has positions by depth, and `attend` uses
            ``batch.tree_mask``. Commit with `accepted_path`. See docs/speculative.md.
        draft_ids : list of (integers or None), optional
            Ids of the last new tokens of each sequence, past those whose ids it knows: ``batch.token_ids`` has them,
            and the sequence does not learn them. Append those that are accepted after the commit.
        stream : int or a stream, optional
            The stream that the step will run on, for a cache on CUDA; CuPy's current stream by default. It waits for
            the stream of the previous step, and the host does not wait. With `out` nothing is allocated. The stream
            must stay valid until a prepare with another stream: swaps and undone steps use it too.

        Raises
        ------
        OutOfBlocks
            Blocks or state slots are short; nothing was changed. The message says which, and `requested` and
            `available` count them.
        InvalidSequence, ShapeError
            A sequence that is not of this cache, listed twice or in flight; invalid counts, `parents` or `draft_ids`;
            more draft ids than new tokens without known ids. With cross-attention layers: a sequence without a number
            of encoder tokens, or whose encoder tokens another step in flight writes.
        UnsupportedOption
            In a cache with layers that keep states: a tree of more than 1 + `draft_tokens` tokens, with several roots
            in layers that work in place, or of a sequence that shares keys past its last state.
        UnsupportedOption, DeviceError
            An invalid stream, or one that is being captured: a graph can use a step but not prepare it.
        """
        plan = partial(ready, self._parts, sequences, counts, out, stream, parents=parents, draft_ids=draft_ids)
        return take_step(self._parts.state, plan, partial(refusal, self._parts))

    def try_prepare(
        self,
        sequences: Listed[Sequence],
        counts: ArrayLike,
        out: Batch | None = None,
        *,
        parents: Listed[ArrayLike | None] | None = None,
        draft_ids: Listed[ArrayLike | None] | None = None,
        stream: object = None,
    ) -> Batch | None:
        """Call `prepare`; return None instead of raising `OutOfBlocks`."""
        plan = partial(ready, self._parts, sequences, counts, out, stream, parents=parents, draft_ids=draft_ids)
        return take_step(self._parts.state, plan, None)

    def prepare_arrival(
        self,
        sequence: Sequence,
        num_tokens: int,
        out: Batch | None = None,
        *,
        num_sealed_tokens: int | None = None,
        stream: object = None,
    ) -> Batch:
        """Prepare a step of one sequence whose next `num_tokens` tokens were computed elsewhere.

        Write the received keys and values with `write`, or to the batch's slots, then commit; the batch does not
        attend. docs/arrivals.md has an example. In a group with a window, blocks are taken only for tokens that the
        token after the arrival sees; the other blocks are holes (block 0), with slots -1 that `write` skips. With sink
        tokens all blocks are taken, and commit releases those between the sinks and the window. Commit publishes the
        blocks that stay; a later sequence reuses the prefix up to where its windows are complete. Blocks that
        the sequence held before and that leave a window are released by commit, so the pool of the window holds both
        until then; after an abandon they stay. A sequence added with ``max_tokens=0`` holds none.

        Parameters
        ----------
        sequence : Sequence
            Idle, with known ids. Pass the tokens that follow its `num_computed_tokens`: it already has its cached
            prefix.
        num_tokens : int
        num_sealed_tokens : int, optional
            For layers with sealed blocks (format "kivi2" or "kivi4"): leading tokens of the sequence whose codes and
            scales arrive instead, a multiple of the block size. Write those to `sealed_planes`, in the blocks with
            index ``sequence.num_sealed_tokens // block_size`` to before ``num_sealed_tokens // block_size`` of
            ``batch.group(layer).sealed.block_table[sequence.row]``: other sequences may share the blocks before them.
            Skip entries that are 0, the holes of windows. The slots of these tokens in the tail are -1. `residual` and
            `lookahead` do not limit the number. By default all tokens arrive as numbers, and commit seals them; layers
            with a window and sealed blocks refuse that.
        out, stream
            As for `prepare`.

        Raises
        ------
        ShapeError
            `num_sealed_tokens` is negative, not a multiple of the block size, or more than the computed tokens and
            those that arrive.
        UnsupportedOption
            `num_sealed_tokens` in a cache without sealed blocks; more than the sequence has, if its last computed
            tokens are not sealed. No `num_sealed_tokens` for layers with a window and sealed blocks.
        OutOfBlocks, InvalidSequence, ShapeError, UnsupportedOption, DeviceError
            As for `prepare`.
        """
        plan = partial(ready, self._parts, [sequence], num_tokens, out, stream, True, num_sealed=num_sealed_tokens)
        return take_step(self._parts.state, plan, partial(refusal, self._parts))

    def try_prepare_arrival(
        self,
        sequence: Sequence,
        num_tokens: int,
        out: Batch | None = None,
        *,
        num_sealed_tokens: int | None = None,
        stream: object = None,
    ) -> Batch | None:
        """Call `prepare_arrival`; return None instead of raising `OutOfBlocks`."""
        plan = partial(ready, self._parts, [sequence], num_tokens, out, stream, True, num_sealed=num_sealed_tokens)
        return take_step(self._parts.state, plan, None)

    def commit(
        self,
        batch: Batch,
        accepted: ArrayLike | None = None,
        *,
        accepted_path: Listed[ArrayLike | None] | None = None,
    ) -> None:
        """Count the tokens of a step as computed, publish full blocks, and release blocks that left every window.

        Full blocks with known ids become available to later sequences with the same prefix, up to the first block that
        another sequence shares.

        Parameters
        ----------
        accepted : int or list of int, optional
            Tokens of each sequence to keep; all by default. The others (rejected drafts) are forgotten, but their
            blocks stay with the sequence for its next tokens.
        accepted_path : list of (integers or None), optional
            For a step with `parents`, and instead of `accepted`: the indices of the accepted tokens of each sequence
            among its new tokens, from one without a parent to one of its descendants; may be empty. None accepts all
            tokens of a chain. The tokens move together in every plane of every layer, on CUDA on the stream of the
            step; the others are forgotten.

        Raises
        ------
        InvalidSequence
            The batch has no step in flight, or belongs to another cache.
        ShapeError
            More accepted tokens than the step has, not one count or path per sequence, a path that is not one of the
            tree, or a step with trees and no path. After every error nothing was changed.
        UnsupportedOption
            A sequence would have no state after its accepted tokens: only a step of up to ``1 + draft_tokens`` tokens
            can be accepted in part. Or tokens move in a cache with planes per block that cannot be renewed.
        DeviceError
            Tokens move, or blocks are sealed, while the stream of the cache or of the step is captured. A device that
            fails during the moves loses them.
        """
        step = own_step(self._parts.state, batch)
        save = partial(save_checkpoints, self._parts, step)
        step.commit(accepted, accepted_path, partial(slot_moves, self._parts), save)

    def abandon(self, batch: Batch | Sequence | Iterable[Sequence]) -> None:
        """Undo a prepare whose forward pass failed.

        Blocks that were copied on write stay copied, and capacity left by rejected tokens is released too. The batch's
        slot mappings become padding, so that a late write overwrites nothing. If states are written in place, the pass
        may have overwritten them: a sequence returns to its last checkpoint, or to 0 tokens, and `num_computed_tokens`
        says so.

        Parameters
        ----------
        batch : Batch, Sequence or iterable of Sequence
            The batch; or, without the batch, sequences whose steps are abandoned, each with all of its sequences.

        Raises
        ------
        InvalidSequence
            The batch or a sequence has no step in flight, or belongs to another cache.
        """
        if isinstance(batch, Batch):
            own_step(self._parts.state, batch).abandon()
        else:
            abandon_steps(self._parts.state, batch)

    def write(self, layer: int, key: Any, value: Any, batch: Batch, *, stream: object = None) -> None:
        """Write the step's keys ``[T, num_kv_heads, head_dim]`` and values ``[T, num_kv_heads, v_head_dim]``.

        T is the batch's `num_tokens` or more. Floats are cast or quantised to the spec's format. A `LatentSpec` takes
        latents ``[T, latent_dim]`` and rotated parts ``[T, rope_dim]`` (None for a rope_dim of 0). A `CrossSpec` takes
        the encoder's keys and values, of the tokens that `Batch.cross` counts. `stream` is that of the prepare.

        Raises
        ------
        ShapeError, UnsupportedDtype
            Arrays that do not fit; nothing was written.
        DeviceError
            Arrays on another device than the cache, or a cache with ``device="none"``.
        UnsupportedOption
            A layer whose spec stores neither key and value nor latents.
        InvalidSequence
            A batch of another cache, or one without a step in flight.
        """
        own_step(self._parts.state, batch).run(write_step, self._parts, layer, key, value, batch, stream)

    def attend(self, layer: int, query: Any, batch: Batch, **options: Any) -> Any:
        """Return the attention of the step's queries ``[T, num_query_heads, head_dim]`` to their sequences.

        T is the batch's `num_tokens`, or more with trailing padding, whose output is 0. All options of
        `paged_attention` are accepted except `rows` and `cu_query_lens`, which the batch supplies; window, scale,
        softcap and sinks default to those of the layer's spec. Returned are ``[T, num_query_heads, v_head_dim]`` in the
        framework of the query, and in its dtype unless it is float8 or `out` or `output_scale` is given: then the dtype
        is that of `paged_attention`. For layers with latents, `query` is the pair ``(query_latent, query_rope)`` of
        `latent_attention`, with its options and result.

        Raises
        ------
        PagecoreError
            As `write`, `paged_attention` and `latent_attention`; InvalidSequence also for a batch of `prepare_arrival`,
            UnsupportedOption for an option that the batch supplies.
        """
        return own_step(self._parts.state, batch).run(attend_step, self._parts, layer, query, batch, options)
