"""The handlers run on XLA's threads, several at a time and without the GIL."""

from __future__ import annotations

import sys
import threading

import numpy as np

from tests.interop.jax.on_jax import random_write, same, written
from tests.ops.cases import Shape, make_case

PROMPT = Shape(seq_lens=(700, 900), query_lens=(200, 300))


def in_threads(*bodies):
    """Run each body in its own thread, and re-raise the first exception."""
    raised = []

    def guarded(body):
        try:
            body()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=guarded, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def test_two_jitted_functions_run_in_two_threads(jax, interop):
    case = make_case(PROMPT)
    expected = case.run().tobytes()
    caches = [jax.numpy.array(cache) for cache in (case.key_cache, case.value_cache)]
    attend = jax.jit(lambda q, k, v: interop.paged_attention(q, k, v, case.block_table, case.seq_lens, **case.options))
    step = interop.jit(lambda rows, k, v, slots: interop.write_kv(*rows, k, v, slots), caches=("k", "v"))

    def prompts():
        for _ in range(20):
            assert np.allclose(attend(case.query, *caches), np.frombuffer(expected, np.float32).reshape(-1, 4, 64))

    def writes(seed):
        _, given, _ = random_write(seed)
        now = [jax.numpy.array(cache) for cache in given]
        for i in range(40):
            rows, _, slots = random_write(100 * seed + i)
            now, given = step(rows, *now, slots), written(rows, given, slots)
        assert same(now, given)

    in_threads(prompts, prompts, lambda: writes(1), lambda: writes(2))


def test_a_handler_does_not_wait_for_the_gil(jax, interop):
    """The call ends although this thread never releases the GIL."""
    case = make_case(PROMPT)
    arrays = [jax.numpy.array(array) for array in case.arrays]

    @jax.jit
    def several(*arrays):  # long enough to run on a thread of XLA's own
        out = arrays[0]
        for _ in range(3):
            out = interop.paged_attention(out, *arrays[1:], **case.options)
        return out

    several(*arrays).block_until_ready()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    try:
        out = several(*arrays)
        for _ in range(10**8):
            if out.is_ready():
                break
    finally:
        sys.setswitchinterval(interval)
    assert out.is_ready()
