"""Operations for `jax.jit` on the host, over caches that JAX owns, and views of pagecore's own caches.

    write_kv, paged_attention     custom calls of XLA that run pagecore's host kernels
    seal_kv, unseal_kv            the same for sealed blocks of 2 or 4 bits
    hadamard                      rotations of rows, by operations of JAX
    jit                           jax.jit that updates caches in place, or raises if XLA copied them
    step_arrays                   a prepared batch as arguments of a jitted step
    as_jax                        a plane of a pool, or any pagecore.Tensor, as an array over the same memory

Every build of pagecore contains the handlers of the custom calls; JAX (`jax>=0.10`) can be installed later. The
others than `hadamard` have no gradients and do not support `vmap`.
"""

try:
    import jax as _jax
except ImportError as error:
    raise ImportError(f"pagecore.interop.jax needs JAX ({error}): pip install 'pagecore[jax]'", name="jax") from error

from pagecore.interop.jax.arrays import StepArrays, as_jax, step_arrays
from pagecore.interop.jax.in_place import jit
from pagecore.interop.jax.operators import paged_attention, write_kv
from pagecore.interop.jax.registration import register
from pagecore.interop.jax.rotations import hadamard
from pagecore.interop.jax.sealing import seal_kv, unseal_kv

__all__ = [
    "StepArrays",
    "as_jax",
    "hadamard",
    "jit",
    "paged_attention",
    "seal_kv",
    "step_arrays",
    "unseal_kv",
    "write_kv",
]

register()
del register, _jax
