"""OpenVINO's paged attention on the host over a cache of 8-bit codes, as a control of the bench "formats".

Its op writes the new tokens and then attends, so pagecore does both, too. A block has 32 tokens. Keys have a scale
and a zero point for each channel of a block, values for each token and head. Queries, new tokens and the result are
float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

from bench.peers import PeerMissing

NAME = "OpenVINO, u8"
BLOCK = 32
RECIPE = "  pip install openvino==2026.4.1\n(into the environment that runs the bench)"
FILLED = 128  # blocks that one call fills
# Inputs that this bench leaves empty, by dtype.
_EMPTY = {name: np.zeros(0, dtype) for name, dtype in (("f", np.float32), ("i", np.int32), ("u", np.uint8))}


@cache
def load() -> Any:
    """Return the modules; raises PeerMissing."""
    try:
        import openvino
        from openvino import opset13
        from openvino._pyopenvino.op import _PagedAttentionExtension
    except ImportError as error:
        raise PeerMissing(f"{NAME}: {error}. To install it:\n{RECIPE}") from error
    return openvino, opset13, _PagedAttentionExtension


def _model(heads: tuple[int, int], dim: int, threads: int) -> Any:
    """Return a compiled model of one attention with `heads` (of queries, of keys)."""
    openvino, opset, paged_attention = load()

    def given(name: str, rank: int, dtype: Any, width: int | None = None) -> Any:
        shape = [-1] * rank if width is None else [-1, width]
        node = opset.parameter(openvino.PartialShape(shape), dtype, name)
        node.output(0).set_names({name})
        return node

    real, index = openvino.Type.f32, openvino.Type.i32
    tokens = [given(name, 2, real, count * dim) for name, count in zip("qkv", (heads[0], *heads[1:] * 2), strict=True)]
    caches = [given(name, 4, openvino.Type.dynamic) for name in ("key_cache.0", "value_cache.0")]
    lists = [given(name, 1, index) for name in ("past_lens", "subsequence_begins", "block_indices")]
    lists.append(given("block_indices_begins", 1, index))
    longest, window = given("max_context_len", 0, index), given("score_window", 1, index)
    scale, zero = np.float32(dim**-0.5), np.int32(0)
    rest: list[Any] = [scale, zero, _EMPTY["f"], longest, window, _EMPTY["i"], _EMPTY["i"], _EMPTY["f"]]
    rest += [_EMPTY["f"], np.int32(64), np.int32(8), _EMPTY["f"], zero, *[_EMPTY["i"]] * 4, _EMPTY["u"], _EMPTY["i"]]
    nodes = [*tokens, *caches, *lists, *(each if hasattr(each, "output") else opset.constant(each) for each in rest)]
    attention = paged_attention([node.output(0) for node in nodes])
    facts = attention.get_rt_info()
    facts["num_k_heads"] = facts["num_v_heads"] = heads[1]
    facts["k_head_size"] = facts["v_head_size"] = dim
    inputs = [*tokens, *caches, *lists, longest, window]
    options = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    options |= {"NUM_STREAMS": 1, "ENABLE_CPU_PINNING": "NO", "KV_CACHE_PRECISION": "u8"}
    return openvino.Core().compile_model(openvino.Model([attention.output(0)], inputs, "paged"), "CPU", options)


class PeerCache:
    """A cache of some sequences of equal length, in scattered blocks; a call writes a token of each and attends.

    Parameters
    ----------
    heads : (int, int)
        Query heads and key-value heads.
    dim : int
    sequences, context : int
        The context, new token included, is a multiple of 32.
    threads : int
    """

    def __init__(self, heads: tuple[int, int], dim: int, sequences: int, context: int, threads: int) -> None:
        self._openvino = load()[0]
        model = _model(heads, dim, threads)
        self._request, self._width, self._context = model.create_infer_request(), heads[0] * dim, context
        self._tensors: dict[str, Any] = {}
        each = context // BLOCK
        self._order = 1 + np.random.default_rng(1).permutation(sequences * each).reshape(sequences, each)
        caches = {}
        for name in ("key_cache.0", "value_cache.0"):
            sizes = model.input(name).get_partial_shape()
            caches[name] = np.zeros((sequences * each + 1, *(sizes[axis].get_length() for axis in (1, 2, 3))), np.uint8)
        self._set(caches)

    def _set(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            self._tensors[name] = array, self._openvino.Tensor(array, shared_memory=True)
            self._request.set_tensor(name, self._tensors[name][1])

    def _feed(self, tokens: tuple[np.ndarray, ...], past: int, lengths: int, blocks: np.ndarray) -> None:
        """Set the inputs of a call: `lengths` tokens of each row of `blocks` after `past` others."""
        begins = np.arange(len(blocks) + 1)
        lists = {"past_lens": np.full(len(blocks), past), "subsequence_begins": begins * lengths}
        lists |= {"block_indices": blocks.reshape(-1), "block_indices_begins": begins * blocks.shape[1]}
        lists |= {"score_window": np.zeros(len(blocks)), "max_context_len": np.array(past + lengths)}
        self._set({name: np.asarray(array, np.int32, order="C") for name, array in lists.items()})
        self._set({name: np.asarray(array, np.float32, order="C") for name, array in zip("qkv", tokens, strict=True)})

    def fill(self, sequence: int, key: np.ndarray, value: np.ndarray) -> None:
        """Write the keys and values ``[context, kv heads * dim]`` of a sequence."""
        blocks = self._order[sequence]
        for first in range(0, len(blocks), FILLED):
            part = blocks[first : first + FILLED, None]
            rows = slice(first * BLOCK, (first + len(part)) * BLOCK)
            query = np.zeros((len(part) * BLOCK, self._width))
            self._feed((query, key[rows], value[rows]), 0, BLOCK, part)
            self()

    def set_step(self, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> None:
        """Set the rows ``[sequences, heads * dim]`` of the next calls; each call replaces the last token."""
        self._feed((query, key, value), self._context - 1, 1, self._order)

    def __call__(self) -> None:
        self._request.start_async()
        self._request.wait()

    @property
    def out(self) -> np.ndarray:
        """A copy of the result of the last call, ``[sequences, query heads * dim]``."""
        return np.array(self._request.get_output_tensor(0).data)
