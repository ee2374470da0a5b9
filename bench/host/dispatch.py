"""Overhead of a call from NumPy, torch, compiled torch and jitted JAX, against the plain call on pagecore Tensors.

The calls have one token for each of two short sequences, so that little but the dispatch is timed. If a framework
calls through its own dispatcher, pagecore's function on the same arrays is a second control.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from bench.harness.runner import Bench, Work
from bench.harness.targets import DISPATCH_US_MAX
from pagecore import as_tensor, ops

HEADS, KV_HEADS, DIM, BLOCK, SEQUENCES = 4, 2, 16, 16, 2
SIZES = {"query_heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "block_size": BLOCK, "sequences": SEQUENCES}
OPERATIONS = ("write_kv", "paged_attention")
PLAIN = "pagecore.Tensor"


@dataclass(frozen=True)
class Side:
    """The two calls of one framework; `more_controls` has additional controls by operation."""

    name: str
    write: Work
    attend: Callable[[], Any]
    more_controls: dict[str, dict[str, Work]] = field(default_factory=dict)
    at_most: float | None = None


@dataclass(frozen=True)
class Case:
    """The arrays of both calls, made by `convert`."""

    written: tuple[Any, ...]
    attended: tuple[Any, ...]

    @classmethod
    def make(cls, convert: Callable[[np.ndarray], Any]) -> Case:
        random = np.random.default_rng(0)
        caches = [convert(random.normal(size=(4, BLOCK, KV_HEADS, DIM)).astype(np.float32)) for _ in range(2)]
        key, value = (convert(random.normal(size=(SEQUENCES, KV_HEADS, DIM)).astype(np.float32)) for _ in range(2))
        query = convert(random.normal(size=(SEQUENCES, HEADS, DIM)).astype(np.float32))
        slots = convert(np.array([BLOCK + 2, 3 * BLOCK + 4], np.int32))
        table, lens = convert(np.array([[1], [3]], np.int32)), convert(np.array([3, 5], np.int32))
        return cls((key, value, *caches, slots), (query, *caches, table, lens))

    def side(self, name: str, write: Callable[..., Any], attend: Callable[..., Any], **more: Any) -> Side:
        return Side(name, partial(write, *self.written), partial(attend, *self.attended), **more)


def run(bench: Bench, _options: argparse.Namespace) -> None:
    """Compare each installed framework with the plain call."""
    plain = Case.make(as_tensor).side(PLAIN, ops.write_kv, ops.paged_attention)
    plain.write()
    expected = plain.attend().numpy()
    for side in _sides(bench):
        for operation, work, control in zip(
            OPERATIONS, (side.write, side.attend), (plain.write, plain.attend), strict=True
        ):
            bench.compare(
                f"{operation}, {side.name}",
                work,
                {PLAIN: control} | side.more_controls.get(operation, {}),
                check=partial(_check, side, expected),
                at_most=side.at_most,
                sizes=SIZES | {"framework": side.name},
            )


def _check(side: Side, expected: np.ndarray) -> None:
    side.write()
    np.testing.assert_allclose(np.asarray(side.attend()), expected, rtol=1e-5, atol=1e-6)


def _sides(bench: Bench) -> Iterator[Side]:
    yield Case.make(np.asarray).side("NumPy", ops.write_kv, ops.paged_attention)
    yield from _torch_sides(bench)
    yield from _jax_sides(bench)


def _torch_sides(bench: Bench) -> Iterator[Side]:
    try:
        import torch

        from pagecore.interop import torch as interop
    except ImportError:
        bench.note("torch is left out, because it is not installed (pip install 'pagecore[torch]')")
        return
    torch.set_num_threads(1)
    case = Case.make(torch.from_numpy)
    direct = case.side("", ops.write_kv, ops.paged_attention)
    name = "pagecore's function, torch arrays"
    more = {"write_kv": {name: direct.write}, "paged_attention": {name: direct.attend}}
    yield case.side(
        "torch eager", interop.write_kv, interop.paged_attention, more_controls=more, at_most=DISPATCH_US_MAX
    )
    # A smoke run skips the slow compiler.
    compiled = partial(torch.compile, fullgraph=True, backend=bench.pick("inductor", "aot_eager"))
    yield case.side("torch.compile", compiled(interop.write_kv), compiled(interop.paged_attention), more_controls=more)


def _jax_sides(bench: Bench) -> Iterator[Side]:
    try:
        import jax

        from pagecore.interop import jax as interop
    except ImportError:
        bench.note("JAX is left out, because it is not installed (pip install 'pagecore[jax]')")
        return
    case = Case.make(jax.numpy.array)
    key, value, *caches, slots = case.written
    write = interop.jit(
        lambda keys, values, *rest: interop.write_kv(rest[0], rest[1], keys, values, rest[2]),
        caches=("keys", "values"),
    )
    attend = jax.jit(interop.paged_attention)

    def written() -> None:
        caches[:] = write(*caches, key, value, slots)  # the arguments were donated
        jax.block_until_ready(caches)

    def attended() -> Any:
        query, _, _, *rest = case.attended
        return jax.block_until_ready(attend(query, *caches, *rest))

    yield Side("JAX jit", written, attended)
