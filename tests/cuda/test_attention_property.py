"""paged_attention on CUDA arrays: random batches, shapes and options against the float64 oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cuda.attention_cases import DeviceCase, check, compare
from tests.cuda.matrix import cases
from tests.ops.cases import make_case
from tests.ops.test_attention_property import options, shapes

pytestmark = pytest.mark.slow

# Examples may share the fixture: it keeps no state between calls.
quick = settings(
    deadline=None,
    max_examples=cases([30], [1000])[0],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
INDICES = ["block_table", "seq_lens", "rows", "cu_query_lens"]


@quick
@given(st.data())
def test_any_batch_with_any_options_keeps_the_bounds(cuda, data):
    shape = replace(data.draw(shapes()), dims=(64, 64), query_dtype="bfloat16", cache_dtype="bfloat16")
    chosen = data.draw(options(shape))
    # Rows of the padded layout are not aligned, which would select the general kernel.
    shape = replace(shape, layout="NHD" if shape.layout == "padded" else shape.layout)
    for name in ("sinks", "key_scale"):
        if name in chosen:
            chosen[name] = np.asarray(chosen[name], np.float32)
    case = make_case(shape, seed=data.draw(st.integers(0, 2**20)), **chosen)
    if data.draw(st.booleans()):
        there = DeviceCase(cuda, case, data.draw(st.sets(st.sampled_from(INDICES))))
        workers = data.draw(st.sampled_from([None, 1, 3, 64]))
        plan = there.plan(batch_invariant=data.draw(st.booleans()), num_workers=workers)
        compare(case, there.run(plan=plan))
    else:
        check(cuda, case, on_host=data.draw(st.sets(st.sampled_from(INDICES))))


@settings(quick, max_examples=cases([12], [500])[0])
@given(st.data())
def test_any_dtypes_and_dims_keep_the_bounds(cuda, data):
    shape = data.draw(shapes())
    chosen = data.draw(options(shape))
    for name in ("sinks", "key_scale"):
        if name in chosen:
            chosen[name] = np.asarray(chosen[name], np.float32)
    case = make_case(shape, seed=data.draw(st.integers(0, 2**20)), **chosen)
    check(
        cuda, case, plan=True, batch_invariant=data.draw(st.booleans()), num_workers=data.draw(st.sampled_from([1, 9]))
    )
