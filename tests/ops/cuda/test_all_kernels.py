"""Every kernel of the manifest compiles for every architecture; decode and prefill spill nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagecore.ops.cuda.compiler import ARCHITECTURES
from pagecore.ops.cuda.cubins import cache_key, set_cache_folder
from pagecore.ops.cuda.manifest import instances
from pagecore.ops.cuda.report import faults
from pagecore.ops.cuda.usage import measure

# Kept from run to run and shared by the processes of a run: only what has changed since is compiled again.
FOLDER = Path(__file__).parents[3] / "build" / "cubins"
SOURCES = sorted({each.source for each in instances()})


@pytest.fixture(scope="module")
def cache(nvrtc):
    """Use the folder of this test as the kernel cache; afterwards delete the cubins of older sources."""
    set_cache_folder(FOLDER)
    try:
        yield
        current = {f"{cache_key([each], name)}.cubin" for name in ARCHITECTURES for each in instances()}
    finally:
        set_cache_folder(None)
    for path in FOLDER.glob("*.cubin"):
        if path.name not in current:
            path.unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles_and_decode_and_prefill_spill_nothing(architecture, source):
    chosen = [each for each in instances() if each.source == source]
    results = list(measure(chosen, [architecture]))
    assert [each.kernel for each in results] == [each.name for each in chosen]
    assert not faults(chosen, results)
