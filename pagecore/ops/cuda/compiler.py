"""NVRTC: sources in, machine code of one architecture out. Needs no device."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pagecore.arrays.cupy_runtime import INSTALL, first_line, import_cupy
from pagecore.errors import CompileError, DeviceError, PagecoreError
from pagecore.ops.cuda.manifest import Instance
from pagecore.ops.cuda.sources import with_headers

# Subnormal numbers and division stay as IEEE says: no fast math, nothing flushed. A product and a sum are one rounding
# where a source says pc_fma, and nowhere else: two paths that promise the same bits are compiled apart. NVRTC 12 has no
# __builtin_offsetof; 12 and 13 have what their own headers make offsetof of. ptxas writes registers and spills into the
# log.
FLAGS = (
    "--std=c++17",
    "-default-device",
    "--fmad=false",
    "--define-macro=__builtin_offsetof(type,member)=__INTADDR__(&((static_cast<type*>(nullptr))->member))",
    "--ptxas-options=-v",
)
# What every kernel is compiled for in the tests and the report; a device of another compiles for its own.
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
OLDEST = 80
_ARCHITECTURE = re.compile(r"sm_([0-9]{2,3})[af]?")
# Of an ELF header: magic, class and byte order; the offsets of the program and section header tables; the size and the
# number of the entries of each.
_ELF_HEADER = struct.Struct("<6s26xQQ6xHHHH")
_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"


@dataclass(frozen=True)
class Cubin:
    """Machine code of some instances.

    Attributes
    ----------
    image : bytes
        What a device loads.
    symbols : dict of str to str
        By the name of an instance, its symbol in the image.
    log : str
        What the compiler had to say.
    """

    image: bytes
    symbols: dict[str, str]
    log: str = ""


def check_architecture(architecture: str) -> str:
    """Return the architecture; DeviceError where the kernels cannot run on it or nobody knows it."""
    match = _ARCHITECTURE.fullmatch(architecture)
    if match is None:
        raise DeviceError(f"architecture is {architecture!r}; it is written sm_80, sm_90a, sm_120")
    if int(match[1]) < OLDEST:
        raise DeviceError(f"the device is of {architecture}; the kernels need sm_{OLDEST} (Ampere) or newer")
    return architecture


@cache
def nvrtc() -> Any:
    """Return CuPy's binding of NVRTC; DeviceError where it, or the library itself, is not there."""
    cuda = import_cupy().cuda
    try:
        cuda.nvrtc.getVersion()
    except Exception:
        _load_library(cuda.runtime.runtimeGetVersion() // 1000)
        try:
            cuda.nvrtc.getVersion()
        except Exception as error:
            told = first_line(error)
            raise DeviceError(f"NVRTC, which compiles kernels, cannot be loaded ({told}): {INSTALL}") from error
    return cuda.nvrtc


def _load_library(major: int) -> None:
    """Load NVRTC out of its wheel, which CuPy 13 does not look for; CuPy then finds it by its name."""
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or () if spec is not None else ():
        for folder in ("cuda_nvrtc", f"cu{major}"):
            library = Path(root) / folder / "lib" / f"libnvrtc.so.{major}"
            if library.is_file():
                with contextlib.suppress(OSError):
                    ctypes.CDLL(str(library))


def compiler_version() -> str:
    """Return the version of NVRTC, such as "13.0"."""
    major, minor = nvrtc().getVersion()
    return f"{major}.{minor}"


def compile_instances(instances: Sequence[Instance], architecture: str) -> Cubin:
    """Compile instances of one source into one image.

    Raises
    ------
    DeviceError
        No CuPy, no NVRTC, or an architecture that it does not know.
    CompileError
        The source has a fault.
    """
    (source,) = {each.source for each in instances}
    text, headers = with_headers(source)
    return compile_source(text, source, headers, {each.name: each.expression for each in instances}, architecture)


def compile_source(
    text: str, name: str, headers: dict[str, str], expressions: dict[str, str], architecture: str
) -> Cubin:
    """Compile any source; `expressions` are the C++ names of the kernels that are wanted, by names of one's own."""
    binding = nvrtc()
    check_architecture(architecture)
    names = [header.encode() for header in headers]
    program = binding.createProgram(text, name, [header.encode() for header in headers.values()], names)
    try:
        for expression in expressions.values():
            binding.addNameExpression(program, expression)
        try:
            binding.compileProgram(program, (f"--gpu-architecture={architecture}", *FLAGS))
        except binding.NVRTCError as error:
            raise _refusal(error, binding.getProgramLog(program), name, architecture) from None
        log = binding.getProgramLog(program).strip("\0\n")
        symbols = {own: binding.getLoweredName(program, expression) for own, expression in expressions.items()}
        image = complete_image(bytes(binding.getCUBIN(program)))
        return Cubin(image, {own: _text(symbol) for own, symbol in symbols.items()}, log)
    finally:
        binding.destroyProgram(program)


def complete_image(image: bytes) -> bytes:
    """Return a cubin with its last byte, which CuPy's getCUBIN cuts off.

    getCUBIN drops the final byte of the image as if it were the NUL at the end of a string, which PTX has and a cubin
    has not. The last bytes of a cubin are the program header table, whose last field, a 64-bit alignment, ends with a
    zero byte in little-endian order. The driver loads the shorter image; nvdisasm and cuobjdump reject it.

    Raises
    ------
    CompileError
        The image is not an ELF file, lacks more than that byte, or does not end with a table of headers.
    """
    try:
        ident, program_start, section_start, *rest = _ELF_HEADER.unpack_from(image)
    except struct.error:
        ident, program_start, section_start, rest = b"", 0, 0, [0] * 4
    program_size, num_programs, section_size, num_sections = rest
    size = max(program_start + program_size * num_programs, section_start + section_size * num_sections)
    if ident != _ELF64_LITTLE_ENDIAN or size - len(image) not in (0, 1):
        raise CompileError(
            f"expected a complete 64-bit ELF image from NVRTC through CuPy, got {len(image):,} bytes of {size:,}; "
            "install another version of CuPy"
        )
    return image.ljust(size, b"\0")


def _refusal(error: Exception, log: str, name: str, architecture: str) -> PagecoreError:
    version = compiler_version()
    if "invalid value for --gpu-architecture" in log:
        return DeviceError(
            f"NVRTC {version} does not compile for {architecture}: install a newer nvidia-cuda-nvrtc.\n{log.strip()}"
        )
    return CompileError(f"NVRTC {version} refuses {name} for {architecture} ({error}):\n{log.strip()}")


def _text(symbol: str | bytes) -> str:
    return symbol.decode() if isinstance(symbol, bytes) else symbol
