"""Kernels are compiled once: when they are first needed, and after a change of an included file."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pagecore.ops.cuda.compilation.manifest import Instance
from tests.emulator import build
from tests.emulator.faults import Fault, plant
from tests.emulator.probing import KERNELS

pytestmark = pytest.mark.slow

SCALE = """
#include "scale.cuh"
namespace pagecore {
template <typename T, int kTimes>
PC_KERNEL(threads_of<T>(), kTimes > 1 ? 2 : 1)
void scale(const PcScale params) {
  Global<T>(params.data).store(pc_thread(), static_cast<T>(kTimes) * Global<T>(params.data).load(pc_thread()));
}
}  // namespace pagecore
"""
HEADER = """
#pragma once
#include "cuda_src/device/primitives.cuh"
struct PcScale { pc_address data; };
template <typename T> constexpr int threads_of() { return sizeof(T) == 8 ? 32 : 64; }
"""


@pytest.fixture
def sources(tmp_path):
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "scale.cu").write_text(SCALE)
    (folder / "scale.cuh").write_text(HEADER)
    (folder / "unrelated.cuh").write_text("")
    return folder


def instance(*arguments):
    return Instance(f"scale<{','.join(arguments)}>", "scale", "scale.cu", arguments)


def test_only_a_change_of_an_included_file_makes_another_library(sources, tmp_path):
    first = build.instance_path(instance("int", "2"), sources, tmp_path)
    made = first.stat().st_mtime_ns
    (sources / "unrelated.cuh").write_text("// changed")
    assert build.instance_path(instance("int", "2"), sources, tmp_path) == first
    assert first.stat().st_mtime_ns == made
    (sources / "scale.cuh").write_text(HEADER + "// changed\n")
    assert build.instance_path(instance("int", "2"), sources, tmp_path) != first


def test_libraries_older_than_a_day_are_removed(sources, tmp_path):
    old = build.instance_path(instance("int", "2"), sources, tmp_path)
    other = build.instance_path(instance("int", "3"), sources, tmp_path)
    for path in (old, other):
        os.utime(path, (0, 0))
    (sources / "scale.cuh").write_text(HEADER + "// changed\n")
    new = build.instance_path(instance("int", "2"), sources, tmp_path)
    assert sorted(tmp_path.glob("*.so")) == sorted([new, other])


def test_the_declared_threads_may_depend_on_template_arguments(sources):
    text = build.unit_text([instance("int", "2")], SCALE)
    assert "template <typename T, int kTimes>\nconstexpr int scale_threads = first_of(threads_of<T>(), kTimes" in text


def test_instances_of_a_bundle_are_in_one_library(monkeypatch, tmp_path):
    first, *others = next(bundle for bundle in build.bundles() if len(bundle) > 1)
    asked = []
    monkeypatch.setattr(build, "compile_library", lambda target, arguments: asked.append(target))
    assert {build.instance_path(each, folder=tmp_path) for each in (first, *others)} == set(asked)
    assert len(set(asked)) == 1


def test_each_bundle_has_instances_of_one_source_and_no_two_have_the_same():
    every = [instance for bundle in build.bundles() for instance in bundle]
    assert len(set(every)) == len(every)
    assert all(len({instance.source for instance in bundle}) == 1 for bundle in build.bundles())


def test_the_error_has_the_output_of_the_compiler(sources, tmp_path):
    (sources / "scale.cu").write_text(SCALE.replace("params.data", "params.date", 1))
    with pytest.raises(build.BuildError, match=r"scale\.cu:.*has no member named .date."):
        build.instance_path(instance("int", "2"), sources, tmp_path)
    assert not list(tmp_path.glob("*.partial"))


def test_an_entry_that_is_not_in_its_source_is_refused(sources, tmp_path):
    with pytest.raises(build.BuildError, match=r"scale\.cu has no PC_KERNEL\(threads, blocks\) void sale"):
        build.instance_path(Instance("sale<int>", "sale", "scale.cu", ("int",)), sources, tmp_path)


def test_several_processes_may_build_one_kernel_at_once(sources, tmp_path):
    code = (
        "from pathlib import Path; from tests.emulator import build\n"
        "from pagecore.ops.cuda.compilation.manifest import Instance\n"
        "import ctypes, sys; build.engine()\n"
        "i = Instance('scale<int,5>', 'scale', 'scale.cu', ('int', '5'))\n"
        "ctypes.CDLL(str(build.instance_path(i, Path(sys.argv[1]), Path(sys.argv[2])))).pc_instance_scale_int_5_"
    )
    command = [sys.executable, "-c", code, str(sources), str(tmp_path)]
    running = [subprocess.Popen(command, cwd=build.ROOT, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[1] for process in running] == [""] * 2
    assert len(list(tmp_path.glob("scale*"))) == 1


ASAN = """
from tests.emulator.probing import KERNELS, probe
from tests.emulator.runtime import EmulatedRuntime
from tests.emulator.test_planted_faults import run_ring
got, expected = run_ring(EmulatedRuntime(KERNELS))
assert (got == expected).all()
print("right", flush=True)
run_ring(EmulatedRuntime("SOURCES", "FOLDER"))
"""


@pytest.mark.slow
def test_kernels_run_under_the_address_sanitizer(tmp_path):
    fault = Fault(
        "second_product",
        "{ const volatile pc_uint32* last = &b[0]; c[0][0] += static_cast<float>(last[2 + params.n]); }",
    )
    sources = plant(tmp_path, KERNELS, fault)
    code = ASAN.replace('"SOURCES"', f"__import__('pathlib').Path({str(sources)!r})")
    code = code.replace('"FOLDER"', f"__import__('pathlib').Path({str(tmp_path)!r})")
    library = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = os.environ | {
        "LD_PRELOAD": library.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "PAGECORE_EMULATE_ASAN": "1",
    }
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=build.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.stdout == "right\n", ran.stderr
    assert "AddressSanitizer: stack-buffer-overflow" in ran.stderr
    assert "ring" in ran.stderr


def test_the_sanitizer_must_be_loaded_first():
    code = "from tests.emulator import build; build.engine()"
    environment = os.environ | {"PAGECORE_EMULATE_ASAN": "1", "LD_PRELOAD": ""}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=build.ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert "run with LD_PRELOAD=$(g++ -print-file-name=libasan.so)" in ran.stderr
