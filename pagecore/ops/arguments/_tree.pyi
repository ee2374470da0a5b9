from typing import Any

import numpy as np
from numpy.typing import NDArray

class TreeMask: ...

def tree_mask(parents: Any, *, words: int | None = None) -> NDArray[np.uint64]: ...
