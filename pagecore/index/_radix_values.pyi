import numpy as np
from numpy.typing import NDArray

_Lanes = NDArray[np.int32] | tuple[NDArray[np.int32], ...]

class Match:
    num_tokens: int
    num_full_tokens: int
    checkpoint: int | None
    state: int | None
    blocks: _Lanes

class Inserted:
    num_tokens: int
    num_old_tokens: int
    taken: _Lanes
    duplicates: _Lanes
    taken_states: NDArray[np.int32]
    duplicate_states: NDArray[np.int32]

class Evicted:
    amount: int
    blocks: _Lanes
    states: NDArray[np.int32]
