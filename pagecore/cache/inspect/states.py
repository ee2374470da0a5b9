"""Recounts of state slots."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pagecore.cache.sequences._sequences import Sequence
from pagecore.errors import InvalidSequence, PagecoreError
from pagecore.index import StateTable


def check_states(states: StateTable, sequences: list[Sequence], cached: NDArray[np.int32]) -> None:
    """Recount every state slot from the rows and the prefix cache, which holds `cached`.

    Raises
    ------
    PagecoreError
        Counts or lengths contradict each other.
    """
    states.check_invariants(exclusive=False)
    kept = states.held_checkpoint_counts()
    np.add.at(kept, cached[cached != 0], 1)
    if not np.array_equal(kept, states.checkpoints.ref_counts()):
        raise PagecoreError("state slots: reference counts do not match the holders (rows + prefix tree)")
    if states.num_checkpoints and not np.array_equal(states.held_counts(), states.slots.ref_counts()):
        raise PagecoreError("running state slots: reference counts do not match the holders (rows)")
    for sequence in sequences:
        if not sequence.is_swapped and states.length(sequence.row) != sequence.num_computed_tokens:
            raise InvalidSequence(
                f"{sequence!r} has a state after {states.length(sequence.row)} tokens, not after its computed ones"
            )
