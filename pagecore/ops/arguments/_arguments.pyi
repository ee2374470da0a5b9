from typing import Any

import numpy as np
from numpy.typing import NDArray

from pagecore.arrays import Tensor
from pagecore.arrays.dtypes.formats import FORMATS as FORMATS

def float_array(array: Any, name: str) -> Tensor: ...
def unlisted_dtype(array: Any) -> str | None: ...

# Everything in _place is for cimport.

# Everything in _indices is for cimport.

# Everything else in _numbers is for cimport.

SMALLEST_SOFTCAP: float

NAMES: tuple[str | None, ...]
FOUR_OVER_SIX: str

class StoredCache: ...
class Selected: ...
class TreeMask: ...

def listed_bits(bits: Any) -> NDArray[np.uint64] | NDArray[np.int64]: ...
def tree_mask(parents: Any, *, words: int | None = None) -> NDArray[np.uint64]: ...

class Sealed: ...
