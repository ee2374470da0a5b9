"""The batch: the arrays that one forward pass needs."""

from __future__ import annotations

from typing import Self

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import Tensor
from pagecore.cache.layers.groups import layer_number
from pagecore.cache.layers.inputs import BatchGroup, SealedInputs
from pagecore.cache.layers.scratch import RowScratch
from pagecore.cache.staging.arrays import StateArrays, arrays_of
from pagecore.cache.state._state import CacheState
from pagecore.cache.step._step import BatchTicket, CrossStep, Step
from pagecore.errors import InvalidSequence, UnsupportedOption
from pagecore.index import StateBuffers, StepBuffers
from pagecore.ops import AttentionPlan
from pagecore.storage import KVPool
from pagecore.storage.checks import shown


class CrossArrays:
    """The encoder side of a batch, which cross-attention layers write and attend to.

    Attributes
    ----------
    rows : Tensor, int32 [max_sequences]
        Row of each sequence's encoder output in the block tables of cross-attention groups.
    seq_lens : Tensor, int32 [max_sequences]
        Encoder tokens of each sequence, all of which its queries see; 0 for padding.
    new_lens : Tensor, int32 [max_sequences]
        Encoder tokens that the step writes for each sequence: all in the first step of an encoder output, 0 afterwards.
        Of several sequences of the step with one output, the first with new tokens counts them. `write` takes them in
        this order.
    host : StepArrays
        The arrays on the host, with these numbers as `query_lens`.
    """

    def __init__(self, step: CrossStep) -> None:
        self._buffers = step.buffers
        self.host = arrays_of(step.buffers)
        self._arrays = self.host if step.staged is None else step.staged.arrays
        self.rows = self._arrays.rows
        self.seq_lens = self._arrays.seq_lens
        self.new_lens = self._arrays.query_lens

    @property
    def num_tokens(self) -> int:
        """Number of encoder tokens that the step writes."""
        return self._buffers.num_tokens

    @property
    def max_tokens(self) -> int:
        """Number of encoder tokens that the batch has room for."""
        return self._buffers.max_tokens

    @property
    def slot_mappings(self) -> tuple[Tensor, ...]:
        """Slots of the written encoder tokens in each cross-attention group; -1 for padding."""
        return self._arrays.slot_mappings


class Batch:
    """The arrays of one forward pass, at fixed addresses, filled by `PagedKVCache.prepare`.

    A batch serves `write` and `attend` from its prepare until its step is committed or abandoned. As a context manager
    it abandons a step that is still in flight when an exception ends the block. A batch that is garbage-collected
    abandons its step too.

    A batch has room for `max_sequences` and `max_tokens`. Unused entries are padding: length 0, slot -1, and a row of
    the block table that holds only null blocks. The arrays are Tensors that alias the batch:
    ``numpy.asarray(batch.positions)`` and ``torch.from_dlpack(batch.positions)`` copy nothing. The next prepare with
    this batch overwrites them. On CUDA they are device memory, which that prepare overwrites in the order of its
    stream. Keep a batch on CUDA, and its cache, alive until the device has finished the work that uses them.

    Attributes
    ----------
    rows : Tensor, int32 [max_sequences]
        Row of each sequence in the block tables.
    query_lens, seq_lens : Tensor, int32 [max_sequences]
        New tokens of each sequence, and its length including them.
    cu_query_lens : Tensor, int32 [max_sequences + 1]
        Start of each sequence's new tokens in the flat arrays.
    positions : Tensor, int32 [max_tokens]
        Position of each new token in its sequence; in a tree, that of the first new token plus the depth.
    token_ids : Tensor, int32 [max_tokens]
        Id of each new token that was known when the step was prepared; -1 for the others.
    host : StepArrays
        The same arrays on the host, from which those on the device were copied.
    cross : CrossArrays or None
        Encoder tokens; None in a cache without cross-attention layers.
    """

    def __init__(
        self,
        step: Step,
        layer_groups: list[int],
        tables: list[Tensor],
        plans: list[AttentionPlan | None],
        sealed: dict[int, tuple[Tensor, KVPool | None]],
    ):
        self._step = step
        self._ticket = BatchTicket(step)
        self._layer_groups = layer_groups
        self.host = arrays_of(step.buffers, states=step.states)
        arrays = self.host if step.staged is None else step.staged.arrays
        self.rows = arrays.rows
        self.query_lens = arrays.query_lens
        self.cu_query_lens = arrays.cu_query_lens
        self.seq_lens = arrays.seq_lens
        self.positions = arrays.positions
        self.token_ids = arrays.token_ids
        self._state_arrays = arrays.states
        self._tree_mask = arrays.tree_mask
        self.cross = None if step.cross is None else CrossArrays(step.cross)
        slots = arrays.slot_mappings + (() if self.cross is None else self.cross.slot_mappings)
        self._sealed = {tail: number for number, tail in enumerate(sealed)}
        inputs = [
            None
            if arrays.sealed_lens is None or group not in sealed
            else SealedInputs(sealed[group][0], arrays.sealed_lens, sealed[group][1])
            for group in range(len(slots))
        ]
        self._scratch = RowScratch()
        self._groups = [BatchGroup(*parts) for parts in zip(slots, tables, plans, inputs, strict=True)]

    @property
    def max_sequences(self) -> int:
        """Number of sequences that the batch has room for."""
        return self._buffers.max_sequences

    @property
    def max_tokens(self) -> int:
        """Number of new tokens that the batch has room for."""
        return self._buffers.max_tokens

    @property
    def num_sequences(self) -> int:
        """Number of sequences of the step."""
        return self._buffers.num_sequences

    @property
    def num_tokens(self) -> int:
        """Number of new tokens of the step."""
        return self._buffers.num_tokens

    @property
    def tree_mask(self) -> Tensor | None:
        """Bits of the step's trees, for `paged_attention`; None if the step was prepared without `parents`.

        int64 ``[max_tokens]``, or ``[max_tokens, words]`` if trees may have more than 64 tokens. Padding is undefined.
        """
        return self._tree_mask if self._step.has_tree else None

    @property
    def in_flight(self) -> bool:
        """True while a prepared step has been neither committed nor abandoned."""
        return self._step.in_flight

    @property
    def state_read(self) -> Tensor:
        """Slot of the state before the new tokens of each sequence: int32 ``[max_sequences]``; 0 for padding.

        The layers that keep states read ``cache.plane(name, layer)[slot]``. All such layers use the same slots. The
        properties of states raise UnsupportedOption in a cache without such layers.
        """
        return self._of_states.state_read

    @property
    def state_write(self) -> Tensor:
        """Slot for the state after the new tokens of each sequence: int32 ``[max_sequences]``; 0 for padding.

        It is the slot of `state_read` if the specs have ``in_place=True``, except in rows with slots in `draft_write`:
        there it is the last of these. Slot 0 may be written, and keeps nothing.
        """
        return self._of_states.state_write

    @property
    def checkpoint_write(self) -> Tensor:
        """Slot for the state after `checkpoint_lengths` tokens: int32 ``[max_sequences]``; 0 for none.

        At the end of the step, or after a token with a slot in `draft_write`, it is the slot of that state.
        """
        return self._of_states.checkpoint_write

    @property
    def checkpoint_lengths(self) -> Tensor:
        """Tokens of each sequence, from its start, before its checkpoint: int32 ``[max_sequences]``; 0 for none."""
        return self._of_states.checkpoint_lengths

    @property
    def draft_read(self) -> Tensor:
        """Slot of the state before each token of a step of up to 1 + draft_tokens: int32 ``[max_sequences, 1 + k]``.

        In a tree of drafts it is the slot that the token's parent writes, or that of `state_read`. Zeros for longer
        steps. Specs without draft tokens raise UnsupportedOption.
        """
        return self._of_drafts(self._of_states.draft_read, "draft_read")

    @property
    def draft_write(self) -> Tensor:
        """Slot for the state after each token of a step of up to 1 + draft_tokens: int32 ``[max_sequences, 1 + k]``.

        As `draft_read`.
        """
        return self._of_drafts(self._of_states.draft_write, "draft_write")

    def _of_drafts(self, found: Tensor | None, name: str) -> Tensor:
        if found is None:
            raise UnsupportedOption(f"the specs have draft_tokens=0; make them with draft_tokens to use {name}")
        return found

    @property
    def state_zeros(self) -> NDArray[np.int32]:
        """Slots that were zeroed before the step: int32 ``[n]``.

        With ``device="none"`` the owner of the bytes zeroes them.
        """
        return self._state_buffers.zeros.copy()

    @property
    def state_copies(self) -> NDArray[np.int32]:
        """Slots that were copied before the step, (source, target), int32 ``[n, 2]``; as `state_zeros`."""
        return self._state_buffers.copies.copy()

    @property
    def state_loads(self) -> NDArray[np.int32]:
        """Quantised checkpoints that were restored before the step, (checkpoint, slot), int32 ``[n, 2]``.

        Empty without a `checkpoint_format`; as `state_zeros`.
        """
        return self._state_buffers.loads.copy()

    @property
    def state_saves(self) -> NDArray[np.int32]:
        """Checkpoints that the commit of the step quantised, (slot, checkpoint), int32 ``[n, 2]``.

        With ``device="none"`` the owner of the bytes quantises them, before the next step.
        """
        return self._state_buffers.saves.copy()

    def group(self, layer: int) -> BatchGroup:
        """Return the slot mapping, block table and plan of the group of a model layer.

        Raises
        ------
        ShapeError
            The cache does not have that layer.
        UnsupportedOption
            The layer keeps a state, and has no blocks.
        """
        return self._groups[self._group_of(layer)]

    def copied_blocks(self, layer: int) -> NDArray[np.int32]:
        """Return the copies on write of the step in the pool of a model layer: (source, target), int32 ``[n, 2]``.

        A cache that holds bytes has already copied them. With ``device="none"`` the owner of the bytes copies them, in
        this order and in every layer of the group, before the step writes.
        """
        group, copied = self._group_of(layer), self._step.copied()
        # Blocks of encoder tokens are written once, and never copied.
        return copied[group] if group < len(copied) else np.zeros((0, 2), np.int32)

    def moved_slots(self, layer: int) -> NDArray[np.int64]:
        """Return the moves of the last commit in the pool of a model layer: (source, target) slots, int64 ``[n, 2]``.

        They bring the tokens of each `accepted_path` together. A cache that holds bytes has already moved them. With
        ``device="none"`` the owner of the bytes moves them, in this order and in every layer of the group, before the
        next step writes; see `move_slots`.
        """
        return self._step.moved_slots()[self._group_of(layer)]

    def sealed_blocks(self, layer: int) -> NDArray[np.int32]:
        """Return the blocks that the last commit sealed, (block of the tail, sealed block): int32 ``[n, 2]``.

        Empty for a layer without sealed blocks. A cache that holds bytes has already quantised them. With
        ``device="none"`` the owner of the bytes does so, in every layer of the group, before the next prepare; see
        `seal_kv`.
        """
        pairs, group = self._step.sealed_pairs, self._group_of(layer)
        return np.zeros((0, 2), np.int32) if pairs is None or group not in self._sealed else pairs[self._sealed[group]]

    def _group_of(self, layer: int) -> int:
        group = self._layer_groups[layer_number(layer, len(self._layer_groups))]
        if group < 0:
            raise UnsupportedOption(
                f"layer {layer} keeps a state and has no slot mapping; use batch.state_read and batch.state_write"
            )
        return group

    @property
    def _of_states(self) -> StateArrays:
        if self._state_arrays is None:
            raise UnsupportedOption("no layer of the cache keeps a state; give the cache a StateSpec for such layers")
        return self._state_arrays

    @property
    def _state_buffers(self) -> StateBuffers:
        assert self._of_states
        states = self._step.states
        assert states is not None
        return states

    @property
    def _buffers(self) -> StepBuffers:
        return self._step.buffers

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self.in_flight:
            self._step.abandon()

    def __repr__(self) -> str:
        sequences = f"{self.num_sequences} of {self.max_sequences} sequences"
        return f"Batch({sequences}, {self.num_tokens} of {self.max_tokens} tokens)"


def own_batch(state: CacheState, batch: Batch) -> Batch:
    """Return a batch of the cache with this state; raise InvalidSequence for anything else."""
    if not isinstance(batch, Batch) or batch._step.state is not state:
        raise InvalidSequence(f"expected a batch of this cache (from prepare or make_batch), got {shown(batch)}")
    return batch


def own_step(state: CacheState, batch: Batch) -> Step:
    """Return the step of a batch of the cache with this state; raise InvalidSequence for anything else."""
    return own_batch(state, batch)._step
