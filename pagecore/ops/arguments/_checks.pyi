from typing import Any

from pagecore.arrays import Tensor

def float_array(array: Any, name: str) -> Tensor: ...
