"""Controls of the attention benches on contiguous key and value: a read of the same bytes, torch's SDPA and NumPy."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import pagecore
from bench.harness.runner import Bench, Work
from bench.harness.torch_control import torch_view
from pagecore.ops.cpu_count import usable_cores

READ, NUMPY, TORCH = "read of the same bytes", "NumPy matmul", "torch SDPA"


def thread_counts(bench: Bench) -> tuple[int, ...]:
    """Return (1, 2), or (1,) with a note if the process may use one core."""
    if usable_cores() < 2:
        bench.note("this process may use one core; figures on two threads are left out")
        return (1,)
    return (1, 2)


@contextmanager
def on_threads(count: int, torch: Any) -> Iterator[None]:
    """Let pagecore and torch use `count` threads."""
    pagecore.set_num_threads(count)
    if torch:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        pagecore.set_num_threads(None)
        if torch:
            torch.set_num_threads(1)


class Reader:
    """Reader of every byte of some arrays, with an equal part for each thread.

    The threads live until `close` and wait at a barrier, so that a read does not pay for starting them. They read with
    NumPy's reduction, which releases the GIL.
    """

    def __init__(self, arrays: Sequence[np.ndarray], threads: int) -> None:
        flat = [array.reshape(-1).view(np.int64) for array in arrays]
        self._parts = [[np.array_split(each, threads)[i] for each in flat] for i in range(threads)]
        self._found = [0] * threads
        self._closing = False
        self._start, self._end = threading.Barrier(threads), threading.Barrier(threads)
        self._workers = [threading.Thread(target=self._work, args=(i,), daemon=True) for i in range(1, threads)]
        for worker in self._workers:
            worker.start()

    def __call__(self) -> int:
        """Read every byte; return the bitwise or of all 8-byte words."""
        self._wait(self._start)
        self._read(0)
        self._wait(self._end)
        return int(np.bitwise_or.reduce(self._found))

    def close(self) -> None:
        self._closing = True
        self._wait(self._start)
        for worker in self._workers:
            worker.join()

    def _wait(self, barrier: threading.Barrier) -> None:
        if self._workers:
            barrier.wait()

    def _read(self, i: int) -> None:
        self._found[i] = np.bitwise_or.reduce([np.bitwise_or.reduce(part) for part in self._parts[i]])

    def _work(self, i: int) -> None:
        while True:
            self._start.wait()
            if self._closing:
                return
            self._read(i)
            self._end.wait()


def torch_attention(torch: Any, query: np.ndarray, key: np.ndarray, value: np.ndarray, *, causal: bool) -> Work:
    """Return a call of SDPA on ``[batch, heads, tokens, dim]``."""
    tensors = [torch_view(torch, array) for array in (query, key, value)]
    return lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=causal)


def numpy_attention(query: np.ndarray, key: np.ndarray, value: np.ndarray, *, causal: bool = False) -> np.ndarray:
    """Return the attention in float32, because NumPy's matmul does not support the other dtypes."""
    scores = query @ key.swapaxes(-2, -1)
    scores *= np.float32(query.shape[-1] ** -0.5)
    if causal:
        scores[..., ~np.tri(scores.shape[-1], dtype=bool)] = -np.inf
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    attended: np.ndarray = scores @ value
    return attended
