from typing import Any

import numpy as np
from numpy.typing import NDArray

class Integers: ...

def int32_array(obj: object, what: str, error: type[Exception]) -> NDArray[np.int32] | np.ndarray[tuple[()], Any]: ...
