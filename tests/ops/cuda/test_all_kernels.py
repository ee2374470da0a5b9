"""Every kernel of the manifest compiles for every architecture, and decode and prefill keep to their registers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagecore.ops.cpu_count import usable_cores
from pagecore.ops.cuda.compiler import ARCHITECTURES
from pagecore.ops.cuda.cubins import cache_key, set_cache_folder
from pagecore.ops.cuda.manifest import instances
from pagecore.ops.cuda.report import faults
from pagecore.ops.cuda.usage import measure

# Kept from run to run: only what has changed since is compiled anew.
FOLDER = Path(__file__).parents[3] / "build" / "cubins"


@pytest.fixture(scope="module")
def results(nvrtc):
    set_cache_folder(FOLDER)
    try:
        yield list(measure(instances(), ARCHITECTURES, usable_cores()))
        wanted = {f"{cache_key([each], name)}.cubin" for name in ARCHITECTURES for each in instances()}
    finally:
        set_cache_folder(None)
    for path in FOLDER.glob("*.cubin"):
        if path.name not in wanted:
            path.unlink()


@pytest.mark.slow
def test_every_kernel_compiles_for_every_architecture_and_decode_and_prefill_spill_nothing(results):
    assert len(results) == len(instances()) * len(ARCHITECTURES)
    assert not faults(instances(), results)
