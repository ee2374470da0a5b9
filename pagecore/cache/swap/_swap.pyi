from collections.abc import Callable
from collections.abc import Sequence as Listed
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.cache.sequences._sequence import Sequence
from pagecore.cache.state._state import CacheState
from pagecore.errors import OutOfBlocks, OutOfRows
from pagecore.index import BlockPool

_Refuse = Callable[[Listed[int], Listed[BlockPool]], OutOfBlocks | None]
_Planes = tuple[int | None, list[Any]]
_Moves = Callable[[Any, bool], tuple[_Planes, _Planes]]

class SwapIn: ...

def swap_out(state: CacheState, sequences: Any, space: Any, refuse: _Refuse, moves: _Moves) -> OutOfBlocks | None: ...
def swap_in(state: CacheState, sequences: Any, refuse: _Refuse, moves: _Moves) -> OutOfBlocks | OutOfRows | None: ...
def stored_blocks(sequence: Sequence) -> tuple[NDArray[np.int32], ...]: ...
def num_distinct(state: CacheState, sequences: list[Sequence]) -> list[int]: ...
def check_stored(state: CacheState, sequence: Sequence, space: Any) -> None: ...
