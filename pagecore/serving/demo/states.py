"""Recurrent layers over the state slots of a step: decodes token by token, prompts chunk by chunk.

A row of the step reads slot `state_read`, writes `state_write` and, if it keeps a checkpoint, writes `checkpoint_write`
with the state after `checkpoint_lengths` tokens of the sequence:

    tokens of the row    |------ cut ------|---- after the cut ----|
    state_read ----------^                 v checkpoint_write      v state_write

Both parts of all rows are computed together, so that a step has at most two passes over each layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pagecore.serving.demo.linear import HeadTokens, chunk_form, step_form
from pagecore.serving.demo.recurrent import RecurrentInputs, RecurrentLayer

__all__ = ["StepStates", "advance"]

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class StepStates:
    """State slots of a step with n rows.

    Attributes
    ----------
    starts : int array [n]
        First token of each row in the step's tokens.
    counts : int array [n]
        Tokens of each row, 1 or more.
    cuts : int array [n]
        Tokens of each row before its checkpoint; 0 without a checkpoint.
    read, write, checkpoint : int array [n]
        Slots.
    """

    starts: Array
    counts: Array
    cuts: Array
    read: Array
    write: Array
    checkpoint: Array

    @classmethod
    def of(
        cls,
        cu_query_lens: Array,
        positions: Array,
        state_read: ArrayLike,
        state_write: ArrayLike,
        checkpoint_write: ArrayLike,
        checkpoint_lengths: ArrayLike,
    ) -> StepStates:
        """Return the slots of a step from arrays of its batch, without padding of `cu_query_lens` ``[n + 1]``."""
        starts, counts = cu_query_lens[:-1], np.diff(cu_query_lens)
        given = (state_read, state_write, checkpoint_write, checkpoint_lengths)
        read, write, checkpoint, lengths = (np.asarray(array)[: len(starts)] for array in given)
        return cls(starts, counts, np.maximum(lengths - positions[starts], 0), read, write, checkpoint)


def advance(
    layer: RecurrentLayer, inputs: RecurrentInputs, conv: Array, temporal: Array, slots: StepStates, chunk: int
) -> Array:
    """Compute the outputs of a step, and write the states of its rows and their checkpoints.

    Parameters
    ----------
    layer : RecurrentLayer
    inputs : RecurrentInputs
        Of the T tokens of the step.
    conv, temporal : array [num_slots, ...]
        Planes of the layer; written in place.
    slots : StepStates
    chunk : int
        Tokens that are computed together.

    Returns
    -------
    array [T, heads * value_dim]
    """
    output = np.empty((len(inputs.channels), layer.sizes.width), inputs.channels.dtype)
    states = _States(conv[slots.read], temporal[slots.read])
    cut = np.flatnonzero(slots.cuts)
    _extend(layer, inputs, states, cut, slots.starts[cut], slots.cuts[cut], chunk, output)
    # A row whose checkpoint is its last state has one slot for both.
    conv[slots.checkpoint[cut]], temporal[slots.checkpoint[cut]] = states.conv[cut], states.temporal[cut]
    rest = np.flatnonzero(slots.counts > slots.cuts)
    starts, counts = slots.starts + slots.cuts, slots.counts - slots.cuts
    _extend(layer, inputs, states, rest, starts[rest], counts[rest], chunk, output)
    conv[slots.write], temporal[slots.write] = states.conv, states.temporal
    return output


@dataclass(slots=True)
class _States:
    """States of the rows of a step: ``[n, channels, kernel - 1]`` and ``[n, heads, value_dim, key_dim]``."""

    conv: Array
    temporal: Array


def _extend(
    layer: RecurrentLayer,
    inputs: RecurrentInputs,
    states: _States,
    rows: Array,
    starts: Array,
    counts: Array,
    chunk: int,
    output: Array,
) -> None:
    """Extend the states of `rows` by `counts` tokens each; rows with one token take the step form."""
    single = counts == 1
    for chosen, size in ((single, 1), (~single, chunk)):
        if chosen.any():
            _extend_alike(layer, inputs, states, rows[chosen], starts[chosen], counts[chosen], size, output)


def _extend_alike(
    layer: RecurrentLayer,
    inputs: RecurrentInputs,
    states: _States,
    rows: Array,
    starts: Array,
    counts: Array,
    chunk: int,
    output: Array,
) -> None:
    """Extend states by whole chunks; tokens of log_decay 0 and strength 0 fill the last ones."""
    longest = -(-int(counts.max()) // chunk) * chunk
    offsets = np.arange(longest)
    is_token = offsets < counts[:, None]
    tokens = np.where(is_token, starts[:, None] + offsets, 0)

    window = np.concatenate([states.conv[rows].swapaxes(1, 2), inputs.channels[tokens]], axis=1)
    ends = counts[:, None] + np.arange(states.conv.shape[2])
    states.conv[rows] = np.take_along_axis(window, ends[..., None], axis=1).swapaxes(1, 2)

    query, key, value = layer.heads(layer.convolved(window))
    by_head = [array.swapaxes(1, 2) for array in (query, key, value)]
    gates = [np.where(is_token[..., None], array[tokens], 0) for array in (inputs.log_decay, inputs.strength)]
    all_tokens = HeadTokens(*by_head, *(array.swapaxes(1, 2) for array in gates))
    form = step_form if chunk == 1 else chunk_form
    state, outputs = states.temporal[rows], []
    for start in range(0, longest, chunk):
        state, part = form(state, all_tokens.part(start, start + chunk), is_delta=layer.is_delta)
        outputs.append(part)
    states.temporal[rows] = state
    read = layer.skipped(np.concatenate(outputs, axis=2).swapaxes(1, 2), value)
    output[tokens[is_token]] = read.reshape(*read.shape[:2], -1)[is_token]
