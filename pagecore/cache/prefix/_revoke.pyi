import numpy as np
from numpy.typing import NDArray

from pagecore.cache.prefix._cache import PrefixCache
from pagecore.cache.prefix.retention import RetentionOptions
from pagecore.cache.sequences._sequence import Sequence

def revoke_prefix(
    prefix: PrefixCache, sequences: list[Sequence], ids: NDArray[np.int32], options: RetentionOptions, valid: int
) -> dict[Sequence, int]: ...
def revoke_block(prefix: PrefixCache, sequences: list[Sequence], group: int, block: int) -> dict[Sequence, int]: ...
