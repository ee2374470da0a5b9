"""Conversions between formats of caches on a device are refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from pagecore import errors, transfer_blocks


def test_formats_are_converted_on_the_host_only(cuda):
    plain = cuda.put(np.zeros((3, 4, 2, 16), np.float32))
    codes, scales = cuda.put(np.full((3, 4, 2, 16), 7, np.int8)), cuda.put(np.full((3, 4, 2, 1), 7, np.float32))
    for sources, targets, options in (
        (plain, codes, {"target_scales": scales}),
        (codes, plain, {"source_scales": scales}),
        ([plain], [codes], {"target_scales": [scales]}),
    ):
        with pytest.raises(
            errors.UnsupportedOption, match="on the host only; for equal formats and factors leave out the scales"
        ):
            transfer_blocks(sources, targets, [(1, 1)], **options)
    latents, rows = cuda.put(np.zeros((3, 4, 576), np.float32)), cuda.put(np.full((3, 4, 656), 7, np.uint8))
    with pytest.raises(errors.UnsupportedOption, match="source_caches is on cuda:0"):
        transfer_blocks(latents, rows, [(1, 1)])
    assert (cuda.get(codes) == 7).all()
    assert (cuda.get(rows) == 7).all()
