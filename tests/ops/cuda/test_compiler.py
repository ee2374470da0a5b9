"""Compilation without a device: images, refusals, and errors without a compiler."""

from __future__ import annotations

import builtins
import ctypes
import sys
import types
from pathlib import Path

import pytest

from pagecore.errors import CompileError, DeviceError
from pagecore.ops.cuda.compilation import compiler
from pagecore.ops.cuda.compilation.compiler import (
    ARCHITECTURES,
    FLAGS,
    check_architecture,
    compile_instances,
    compile_source,
    compiler_version,
    complete_image,
)
from pagecore.ops.cuda.compilation.manifest import instance, instances


def test_instances_of_a_source_become_one_image_with_one_symbol_each(nvrtc, toys):
    found = [each for each in instances() if each.source == "toy.cu"]
    compiled = compile_instances(found, "sm_80")
    assert compiled.image.startswith(b"\x7fELF")
    assert set(compiled.symbols) == {"add<float,1>", "add<float,2>", "add<pc_half,1>", "add<pc_half,2>"}
    assert len(set(compiled.symbols.values())) == 4
    for symbol in compiled.symbols.values():
        assert symbol.encode() in compiled.image


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_primitives_compile_for_every_architecture(nvrtc, toys, architecture):
    assert compile_instances(instances()[:1], architecture).image


def image_of_nvrtc(nvrtc, text, architecture):
    """Return the cubin of a kernel "f" through the C interface of NVRTC."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = ctypes.CDLL(next(line.split()[-1] for line in maps if "libnvrtc.so" in line))
    program = nvrtc.createProgram(text, "f.cu", [], [])
    nvrtc.addNameExpression(program, "f")
    nvrtc.compileProgram(program, (f"--gpu-architecture={architecture}", *compiler.flags()))
    size, handle = ctypes.c_size_t(), ctypes.c_void_p(program)
    assert library.nvrtcGetCUBINSize(handle, ctypes.byref(size)) == 0
    image = ctypes.create_string_buffer(size.value)
    assert library.nvrtcGetCUBIN(handle, image) == 0
    nvrtc.destroyProgram(program)
    return image.raw


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120"])
def test_an_image_has_every_byte_that_nvrtc_made(nvrtc, architecture):
    text = 'extern "C" __global__ void f(float* x) { x[threadIdx.x] *= 3; }'
    whole = image_of_nvrtc(nvrtc, text, architecture)
    assert compile_source(text, "f.cu", {}, {"f": "f"}, architecture).image == whole
    assert complete_image(whole) == complete_image(whole[:-1]) == whole


@pytest.mark.parametrize("cut", [2, 3, 100, -1, -40])
def test_an_image_of_a_wrong_length_is_refused(nvrtc, cut):
    text = 'extern "C" __global__ void f(float* x) { x[threadIdx.x] *= 3; }'
    whole = compile_source(text, "f.cu", {}, {"f": "f"}, "sm_90a").image
    image = whole[:-cut] if cut > 0 else whole + bytes(-cut)
    with pytest.raises(
        CompileError, match=f"got {len(image):,} bytes of {len(whole):,}; install another version of CuPy"
    ):
        complete_image(image)


@pytest.mark.parametrize("image", [b"", b"\x7fELF", bytes(64), b"\x7fELF\1\1" + bytes(58), b"\x7fELF\2\2" + bytes(58)])
def test_an_image_that_is_not_elf_is_refused(image):
    with pytest.raises(CompileError, match="expected a complete 64-bit ELF image"):
        complete_image(image)


def test_a_source_with_an_error_is_refused_with_the_log_of_the_compiler(nvrtc):
    with pytest.raises(CompileError, match=r"refuses bad.cu for sm_80 (?s:.*)bad.cu\(2\): error: identifier \"b\""):
        compile_source("namespace pagecore {\n__global__ void a() { b(); }\n}", "bad.cu", {}, {}, "sm_80")


def test_a_kernel_that_is_not_in_the_source_is_refused(nvrtc):
    with pytest.raises(CompileError, match="error"):
        compile_source("namespace pagecore {}", "none.cu", {}, {"a": "pagecore::a"}, "sm_80")


def test_an_architecture_that_the_compiler_does_not_know_names_the_remedy(nvrtc):
    with pytest.raises(DeviceError, match="does not compile for sm_199: install a newer nvidia-cuda-nvrtc"):
        compile_source("", "empty.cu", {}, {}, "sm_199")


@pytest.mark.parametrize("architecture", ["sm_75", "sm_70", "sm_61"])
def test_an_architecture_that_is_too_old_is_refused(architecture):
    with pytest.raises(DeviceError, match=f"of {architecture}; the kernels need sm_80"):
        check_architecture(architecture)


@pytest.mark.parametrize("architecture", ["90a", "compute_90", "sm_9", "sm_90b", "sm_90a ", ""])
def test_an_invalid_architecture_is_refused(architecture):
    with pytest.raises(DeviceError, match="it is written sm_80, sm_90a"):
        check_architecture(architecture)


def test_no_flag_changes_ieee_arithmetic():
    assert not [flag for flag in FLAGS if "fast" in flag or "ftz" in flag or "prec" in flag]


@pytest.mark.parametrize(
    ("version", "converts"), [((12, 9), False), ((13, 0), False), ((13, 1), True), ((14, 0), True)]
)
def test_versions_that_compile_converted_addresses_without_end_get_none(monkeypatch, version, converts):
    monkeypatch.setattr(compiler, "nvrtc", lambda: types.SimpleNamespace(getVersion=lambda: version))
    assert (compiler.flags() == FLAGS) == converts
    assert compiler.flags()[: len(FLAGS)] == FLAGS


def test_kernels_compile_without_the_conversion(nvrtc, monkeypatch):
    monkeypatch.setattr(compiler, "flags", lambda: (*FLAGS, compiler.UNCONVERTED))
    assert compile_instances([instance("merge_many<float>")], "sm_90a").image


def test_a_product_and_a_sum_are_not_contracted(nvrtc):
    def image(expression):
        text = f'extern "C" __global__ void f(float* x) {{ x[3] = {expression}; }}'
        return compile_source(text, "f.cu", {}, {"f": "f"}, "sm_90a").image

    assert image("x[0] * x[1] + x[2]") == image("__fadd_rn(__fmul_rn(x[0], x[1]), x[2])")
    assert image("fmaf(x[0], x[1], x[2])") != image("x[0] * x[1] + x[2]")


def binding(monkeypatch, version, major=12):
    """Replace CuPy by a stub whose NVRTC binding calls `version`."""
    cuda = types.ModuleType("cupy.cuda")
    cuda.nvrtc = types.SimpleNamespace(getVersion=version)
    cuda.runtime = types.SimpleNamespace(runtimeGetVersion=lambda: major * 1000 + 90)
    cupy = types.ModuleType("cupy")
    cupy.cuda = cuda
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)


@pytest.fixture
def forgetful():
    compiler.nvrtc.cache_clear()
    yield
    compiler.nvrtc.cache_clear()


def not_found():
    raise RuntimeError("CuPy failed to load libnvrtc.so.12: cannot open shared object file")


def test_without_nvrtc_the_extras_are_named(monkeypatch, forgetful):
    binding(monkeypatch, not_found, major=99)
    with pytest.raises(
        DeviceError, match=r"NVRTC, .* cannot be loaded \(RuntimeError: CuPy failed.*install pagecore\[cuda12\]"
    ):
        compiler_version()


@pytest.mark.parametrize("folder", ["cuda_nvrtc", "cu12"])
def test_nvrtc_of_a_wheel_is_loaded_if_cupy_does_not_find_it(monkeypatch, forgetful, tmp_path, folder):
    library = tmp_path / "nvidia" / folder / "lib" / "libnvrtc.so.12"
    library.parent.mkdir(parents=True)
    library.touch()
    loaded = []
    monkeypatch.setattr(ctypes, "CDLL", loaded.append)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    binding(monkeypatch, lambda: (12, 9) if str(library) in loaded else not_found())
    assert compiler_version() == "12.9"


def test_without_cupy_the_extras_are_named(monkeypatch, forgetful):
    plain = builtins.__import__

    def refuse(name, *arguments, **options):
        if name.startswith("cupy"):
            raise ModuleNotFoundError("No module named 'cupy'", name="cupy")
        return plain(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.delitem(sys.modules, "cupy.cuda", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(DeviceError, match=r"CuPy, which is not installed: install pagecore\[cuda12\]"):
        compiler_version()
