"""Selection of kernel variants, for comparisons on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from pagecore.errors import UnsupportedOption
from pagecore.ops.cuda.attention._attention import prefill_variants, swap_prefill_variant


@contextlib.contextmanager
def use_prefill_variant(name: str) -> Iterator[None]:
    """Use another variant of the prefill kernel in a with-block; for benchmarks and tests.

    The selection applies to all threads of the process. Batch-invariant calls run decode by this kernel too. Within the
    block, a call whose dims, dtypes or options have no instance of the variant raises UnsupportedOption before it
    writes anything.

    Parameters
    ----------
    name : {"Plain", "SlotsFirst", "WholeTile", "SlotsFirstWholeTile"}
        "Plain" is the default. "SlotsFirst" reads all slots of a tile before its first copy; results have the same
        bits. "WholeTile" holds the scores of all 64 keys of a tile at once, and loads each query fragment once for them
        rather than twice; the softmax is rescaled at other keys, so results differ by rounding.

    Raises
    ------
    UnsupportedOption
        `name` is not a variant.
    """
    if name not in prefill_variants():
        raise UnsupportedOption(f"expected one of {', '.join(prefill_variants())} as prefill variant, got {name!r}")
    before = swap_prefill_variant(name)
    try:
        yield
    finally:
        swap_prefill_variant(before)
