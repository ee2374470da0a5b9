"""Tensors as arrays of a framework that the caller has imported. This module imports none."""

from __future__ import annotations

import sys
from typing import Any

from pagecore.arrays.views.tensor_like import TensorLike
from pagecore.errors import UnsupportedDtype, UnsupportedOption

JAX_ALIGNMENT = 64


def is_instance(example: object, module: str, kind: str) -> bool:
    """Return True if `example` is an instance of the class `kind` of a framework's `module`.

    False if the module is not imported, or if another thread is importing it and has not defined the class yet: an
    instance cannot exist then.
    """
    found = getattr(sys.modules.get(module), kind, None)
    return found is not None and isinstance(example, found)


def like_framework(tensor: TensorLike, example: object) -> Any:
    """Return `tensor` as an array of the framework of `example`: torch, JAX or CuPy, otherwise NumPy."""
    if is_instance(example, "torch", "Tensor"):
        return _torch_view(tensor, sys.modules["torch"])
    if is_instance(example, "jax", "Array"):
        return _jax_view(tensor, sys.modules["jax"])
    if is_instance(example, "cupy", "ndarray"):
        return tensor.cupy()
    return tensor.numpy()


def _torch_view(tensor: TensorLike, torch: Any) -> Any:
    _refuse_readonly(tensor, "torch")
    refuse_negative_strides(tensor)
    return torch.from_dlpack(tensor)


def _jax_view(tensor: TensorLike, jax: Any) -> Any:
    _refuse_readonly(tensor, "JAX")
    if tensor.pointer % JAX_ALIGNMENT != 0 and tensor.size > 0:
        raise UnsupportedOption(
            f"the tensor is at address {tensor.pointer:#x}; JAX views memory without a copy only at a multiple of "
            f"{JAX_ALIGNMENT}: use a tensor with an allocation of its own, e.g. from empty()"
        )
    try:
        array = jax.dlpack.from_dlpack(tensor, copy=False)
    except Exception as error:
        raise UnsupportedOption(f"JAX cannot view {tensor!r} without a copy: {error}") from error
    if str(array.dtype) != tensor.dtype:
        raise UnsupportedDtype(
            f"JAX converted {tensor.dtype} to {array.dtype}; set jax_enable_x64, or use 32-bit integers"
        )
    return array


def refuse_negative_strides(tensor: TensorLike) -> None:
    """Raise UnsupportedOption for negative strides, on which torch's import aborts the process."""
    if any(stride < 0 and length > 1 for stride, length in zip(tensor.strides, tensor.shape, strict=True)):
        raise UnsupportedOption(
            f"the tensor has strides {tensor.strides}; torch has no negative strides: copy it first"
        )


def _refuse_readonly(tensor: TensorLike, framework: str) -> None:
    if tensor.readonly:
        raise UnsupportedOption(f"the tensor is read-only and {framework} has no read-only arrays; copy it first")
