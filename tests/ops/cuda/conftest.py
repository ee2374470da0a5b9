from __future__ import annotations

from typing import Any

import pytest

from pagecore.ops.cuda.compilation import cubins, manifest, sources
from tests.capabilities import require_nvrtc

TOY = """\
#include "cuda_src/toy.cuh"
struct Params {
  pc_address data;
};
static_assert(__builtin_offsetof(PcWorkItem, key_end) == 16, "offsets can be asserted");
namespace pagecore {
template <typename T, int N>
PC_KERNEL(128, 1) void add(const Params params) {
  twice<N>(Global<T>(params.data));
}
template <int N>
PC_KERNEL(128, 1) void spill(const Params params) {
  mix<N>(Global<float>(params.data));
}
}  // namespace pagecore
"""
TOY_PART = """\
#pragma once
#include "cuda_src/device/primitives.cuh"
template <int N, typename T>
PC_DEVICE void twice(Global<T> data) {
  data.store(pc_thread(), pc_from_float<T>(N * pc_to_float(data.load(pc_thread()))));
}
// Keeps N numbers across a barrier; a large N exceeds the registers of a thread.
template <int N>
PC_DEVICE void mix(Global<float> data) {
  float x[N];
  PC_UNROLL
  for (int i = 0; i < N; ++i) x[i] = data.load(i * pc_thread());
  pc_sync_block();
  PC_UNROLL
  for (int i = 0; i < N; ++i) data.store(i + pc_thread(), x[i] * x[(i * 7 + 1) % N]);
}
"""
MANIFEST = """\
[[kernel]]
entry = "add"
source = "toy.cu"
values = [["float", "pc_half"], [1, 2]]

[[kernel]]
entry = "spill"
source = "decode_toy.cu"
values = [[8]]
"""


@pytest.fixture(scope="session")
def nvrtc() -> Any:
    return require_nvrtc()


@pytest.fixture
def toys(tmp_path, monkeypatch):
    """A folder of toy kernels with the real primitives, and an empty cache."""
    folder = tmp_path / "cuda_src"
    folder.mkdir()
    for name in ("abi/types.h", "device/primitives.cuh"):
        (folder / name).parent.mkdir()
        (folder / name).write_text(sources.read_source(name))
    (folder / "toy.cu").write_text(TOY)
    (folder / "decode_toy.cu").write_text(TOY)
    (folder / "toy.cuh").write_text(TOY_PART)
    (folder / "manifest.toml").write_text(MANIFEST)
    caches = (manifest.instances, manifest._by_name)
    monkeypatch.setattr(sources, "source_folder", lambda: folder)
    for each in caches:
        each.cache_clear()
    cubins.set_cache_folder(tmp_path / "cache")
    yield folder
    cubins.set_cache_folder(None)
    for each in caches:
        each.cache_clear()
