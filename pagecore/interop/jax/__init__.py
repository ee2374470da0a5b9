"""The operations inside of `jax.jit`, on the host, over caches that JAX owns; and pagecore's own caches read there.

    write_kv, paged_attention     custom calls of XLA, served by the host's kernels
    jit                           jax.jit that updates caches in place, or says why it cannot
    step_arrays                   a prepared batch as arguments of a jitted step
    as_jax                        a pool's planes, or any pagecore.Tensor, as arrays over the same memory

The handlers are part of every build of pagecore, so that JAX (`jax>=0.10`) can come later. The operations have no
gradients and do not run under `vmap`.
"""

try:
    import jax as _jax
except ImportError as error:
    raise ImportError(f"pagecore.interop.jax needs JAX ({error}): pip install 'pagecore[jax]'", name="jax") from error

from pagecore.interop.jax.arrays import StepArrays, as_jax, step_arrays
from pagecore.interop.jax.in_place import jit
from pagecore.interop.jax.operators import paged_attention, write_kv
from pagecore.interop.jax.registration import register

__all__ = ["StepArrays", "as_jax", "jit", "paged_attention", "step_arrays", "write_kv"]

register()
del register, _jax
