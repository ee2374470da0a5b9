import numpy as np
from numpy.typing import NDArray

_Lanes = NDArray[np.int32] | tuple[NDArray[np.int32], ...]

class Match:
    num_tokens: int
    num_full_tokens: int
    checkpoint: int | None
    state: int | None
    blocks: _Lanes
    num_shared_tokens: int
    shared_blocks: _Lanes

class Inserted:
    num_tokens: int
    num_old_tokens: int
    @property
    def taken(self) -> _Lanes: ...
    @property
    def duplicates(self) -> _Lanes: ...
    @property
    def taken_states(self) -> NDArray[np.int32]: ...
    @property
    def duplicate_states(self) -> NDArray[np.int32]: ...

class Evicted:
    amount: int
    @property
    def blocks(self) -> _Lanes: ...
    @property
    def states(self) -> NDArray[np.int32]: ...
