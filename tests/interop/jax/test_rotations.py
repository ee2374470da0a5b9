"""hadamard of pagecore.interop.jax: the bits of the host, under jit, vmap and gradients."""

from __future__ import annotations

import numpy as np
import pytest

import pagecore
from pagecore.errors import ShapeError, UnsupportedDtype, UnsupportedOption
from tests.ops.test_hadamard import numbers


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("dim", [8, 96, 128, 512])
def test_rows_have_the_bits_of_the_host(jax, interop, dim, dtype):
    rows = numbers(5, 3, dim, dtype=dtype)
    expected = pagecore.hadamard(rows)
    for call in (interop.hadamard, jax.jit(interop.hadamard), jax.jit(jax.vmap(interop.hadamard))):
        assert np.asarray(call(jax.numpy.asarray(rows))).tobytes() == expected.tobytes()


def test_gradients_are_rotated_back(jax, interop):
    rows, weights = jax.numpy.asarray(numbers(4, 32)), jax.numpy.asarray(numbers(4, 32, seed=1))
    gradient = jax.grad(lambda x: (interop.hadamard(x) * weights).sum())(rows)
    np.testing.assert_allclose(gradient, pagecore.hadamard(np.asarray(weights)), rtol=1e-5, atol=1e-5)


def test_misuse_is_refused_by_name(jax, interop):
    with pytest.raises(UnsupportedOption, match=r"x is a ndarray; expected a jax\.Array"):
        interop.hadamard(numbers(2, 8))
    with pytest.raises(ShapeError, match="multiple of 8"):
        interop.hadamard(jax.numpy.ones((2, 12)))
    with pytest.raises(ShapeError, match="multiple of 8"):
        interop.hadamard(jax.numpy.float32(1))
    with pytest.raises(UnsupportedDtype, match="x is int32"):
        interop.hadamard(jax.numpy.ones((2, 8), jax.numpy.int32))
