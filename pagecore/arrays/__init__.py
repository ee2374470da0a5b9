"""Framework-agnostic tensors: dtypes, memory on the host and on CUDA devices, DLPack import and export."""

from pagecore.arrays._make import empty, like, strided, zeros
from pagecore.arrays._tensor import Tensor, as_tensor
from pagecore.arrays.dtypes import DType, as_dtype

__all__ = ["DType", "Tensor", "as_dtype", "as_tensor", "empty", "like", "strided", "zeros"]
