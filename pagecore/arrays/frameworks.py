"""Tensors as arrays of the framework that the caller has imported; none is imported here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pagecore.errors import UnsupportedDtype, UnsupportedOption

if TYPE_CHECKING:
    from pagecore.arrays._tensor import Tensor

JAX_ALIGNMENT = 64


def is_instance(example: object, module: str, kind: str) -> bool:
    """Whether `example` is of a class of a framework: not where nobody has imported that, or its import has just begun.

    A module stands in `sys.modules` before its names do; who has one of its arrays has waited for them.
    """
    found = getattr(sys.modules.get(module), kind, None)
    return found is not None and isinstance(example, found)


def like_framework(tensor: Tensor, example: object) -> Any:
    """Return `tensor` as what `example` is: an array of torch, JAX or CuPy, else of NumPy."""
    if is_instance(example, "torch", "Tensor"):
        return _torch_view(tensor, sys.modules["torch"])
    if is_instance(example, "jax", "Array"):
        return _jax_view(tensor, sys.modules["jax"])
    if is_instance(example, "cupy", "ndarray"):
        return tensor.cupy()
    return tensor.numpy()


def _torch_view(tensor: Tensor, torch: Any) -> Any:
    _refuse_readonly(tensor, "torch")
    refuse_negative_strides(tensor)
    return torch.from_dlpack(tensor)


def _jax_view(tensor: Tensor, jax: Any) -> Any:
    _refuse_readonly(tensor, "JAX")
    if tensor.pointer % JAX_ALIGNMENT != 0 and tensor.size > 0:
        raise UnsupportedOption(
            f"the tensor lies at {tensor.pointer:#x}, no multiple of {JAX_ALIGNMENT}, where JAX would copy; "
            "put it in a tensor of its own, e.g. from empty()"
        )
    try:
        array = jax.dlpack.from_dlpack(tensor, copy=False)
    except Exception as error:
        raise UnsupportedOption(f"JAX cannot show {tensor!r} without a copy: {error}") from error
    if str(array.dtype) != tensor.dtype:
        raise UnsupportedDtype(f"JAX made {array.dtype} of {tensor.dtype}; set jax_enable_x64, or use 32-bit integers")
    return array


def refuse_negative_strides(tensor: Tensor) -> None:
    """Refuse what torch has no strides for: its own import ends the process instead of raising."""
    if any(stride < 0 and length > 1 for stride, length in zip(tensor.strides, tensor.shape, strict=True)):
        raise UnsupportedOption(f"the tensor has strides {tensor.strides}; torch knows no negative ones: copy it first")


def _refuse_readonly(tensor: Tensor, framework: str) -> None:
    if tensor.readonly:
        raise UnsupportedOption(f"the tensor is read-only, which {framework} cannot say of an array; copy it first")
