from collections.abc import Callable
from typing import Any

from pagecore.cache.sequences._sequence import Sequence
from pagecore.cache.state._state import CacheState
from pagecore.ops.moves._slot_moves import SlotMoves

class Plan: ...

def compact(state: CacheState, sequence: Sequence, keep: Any, moves: Callable[[], list[SlotMoves]]) -> None: ...
