"""Framework-agnostic tensors: dtypes, memory on the host and on CUDA devices, DLPack import and export."""

from pagecore.arrays.dtypes.dtype import DType, as_dtype
from pagecore.arrays.tensors._make import empty, like, strided, zeros
from pagecore.arrays.tensors._tensor import Tensor, as_tensor

__all__ = ["DType", "Tensor", "as_dtype", "as_tensor", "empty", "like", "strided", "zeros"]
