"""Every kernel of the manifest compiles for every architecture; decode and prefill spill nothing.

Programs that the record of resources covers are not compiled again, except one of each subject.
"""

from __future__ import annotations

import functools
import time
from collections import Counter

import pytest

from pagecore.ops.cuda.compilation import cubins
from pagecore.ops.cuda.compilation.compiler import ARCHITECTURES
from pagecore.ops.cuda.compilation.cubins import cache_key, set_cache_folder
from pagecore.ops.cuda.compilation.manifest import instances
from pagecore.ops.cuda.compilation.usage import measure
from pagecore.ops.cuda.report import faults
from tests.ops.cuda import usage_record
from tests.ops.cuda.usage_record import FOLDER, SOURCES, compiled_always, of_source, recorded, subject_of


@pytest.fixture(scope="module")
def cache(nvrtc):
    """Use the folder of this test as the kernel cache; afterwards delete the cubins of sources older than a day.

    Each key of a kernel is made of the texts of its source and headers, which are read once.
    """
    set_cache_folder(FOLDER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cubins, "with_headers", functools.cache(cubins.with_headers))
        try:
            yield
            if old := [path for path in FOLDER.glob("*.cubin") if path.stat().st_mtime < time.time() - 24 * 3600]:
                current = {f"{cache_key([each], name)}.cubin" for name in ARCHITECTURES for each in instances()}
                for path in old:
                    if path.name not in current:
                        path.unlink(missing_ok=True)
        finally:
            set_cache_folder(None)


@pytest.mark.slow
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles_and_decode_and_prefill_spill_nothing(architecture, source):
    chosen, results = of_source(source), recorded(source, architecture)
    if results is None:
        results = list(measure(chosen, [architecture]))
    elif sample := compiled_always(source, architecture):
        names = [each.name for each in sample]
        expected = [each for each in results if each.kernel in names]
        assert list(measure(sample, [architecture])) == expected, "the record is wrong: run make kernels"
    assert [each.kernel for each in results] == [each.name for each in chosen]
    assert not faults(chosen, results)


def test_one_instance_of_each_subject_is_compiled_in_spite_of_the_record(nvrtc, monkeypatch):
    monkeypatch.delenv("PAGECORE_KERNELS", raising=False)
    compiled = Counter()
    for source in SOURCES:
        compiled[subject_of(source)] += sum(len(compiled_always(source, name)) for name in ARCHITECTURES)
    assert set(compiled.values()) == {1}
    monkeypatch.setenv("PAGECORE_KERNELS", "all")
    assert all(compiled_always(source, name) == of_source(source) for source in SOURCES for name in ARCHITECTURES)


@pytest.mark.slow
def test_the_record_of_a_changed_source_does_not_count(nvrtc, monkeypatch):
    monkeypatch.setattr(usage_record, "cache_key", lambda *_: "changed")
    assert all(recorded(source, name) is None for source in SOURCES for name in ARCHITECTURES)
