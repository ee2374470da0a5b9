"""Compilation of CUDA sources to machine code of one architecture, by NVRTC; it needs no device."""

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

from pagecore.arrays.cuda.cupy_library import INSTALL, first_line, import_cupy
from pagecore.errors import CompileError, DeviceError, PagecoreError
from pagecore.ops.cuda.compilation.manifest import Instance
from pagecore.ops.cuda.compilation.sources import with_headers

# Subnormal numbers and division follow IEEE 754: no fast math, no flushing. The compiler must not contract a product
# and a sum to an FMA, because kernels that promise equal bits are compiled separately; sources call pc_fma instead.
# NVRTC 12 lacks __builtin_offsetof, so it is defined as in the offsetof macro of NVRTC 12 and 13. With -v, ptxas logs
# registers and spills.
FLAGS = (
    "--std=c++17",
    "-default-device",
    "--fmad=false",
    "--define-macro=__builtin_offsetof(type,member)=__INTADDR__(&((static_cast<type*>(nullptr))->member))",
    "--ptxas-options=-v",
)
# NVRTC before 13.1 compiles without end where a kernel selects one of two converted addresses. Without the conversion
# its loads and stores are generic.
UNCONVERTED = "--define-macro=__cvta_global_to_generic(address)=reinterpret_cast<void*>(address)"
# Architectures of the tests and the report. A device of another architecture compiles for its own.
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120")
OLDEST = 80
_ARCHITECTURE = re.compile(r"sm_([0-9]{2,3})[af]?")
# Fields of an ELF header: magic, class and byte order; the offsets of the program and section header tables; the size
# and the number of entries of each.
_ELF_HEADER = struct.Struct("<6s26xQQ6xHHHH")
_ELF64_LITTLE_ENDIAN = b"\x7fELF\x02\x01"


@dataclass(frozen=True)
class Cubin:
    """Machine code of one or more instances.

    Attributes
    ----------
    image : bytes
        Image that a device loads.
    symbols : dict of str to str
        Symbol in the image for the name of each instance.
    log : str
        Log of the compiler.
    """

    image: bytes
    symbols: dict[str, str]
    log: str = ""


def check_architecture(architecture: str) -> str:
    """Return the architecture; raise DeviceError if it is too old for the kernels or malformed."""
    match = _ARCHITECTURE.fullmatch(architecture)
    if match is None:
        raise DeviceError(f"architecture is {architecture!r}; it is written sm_80, sm_90a, sm_120")
    if int(match[1]) < OLDEST:
        raise DeviceError(f"the device is of {architecture}; the kernels need sm_{OLDEST} (Ampere) or newer")
    return architecture


@cache
def nvrtc() -> Any:
    """Return CuPy's binding of NVRTC; raise DeviceError if CuPy or the library is missing."""
    cuda = import_cupy().cuda
    try:
        cuda.nvrtc.getVersion()
    except Exception:
        _load_library(cuda.runtime.runtimeGetVersion() // 1000)
        try:
            cuda.nvrtc.getVersion()
        except Exception as error:
            reason = first_line(error)
            raise DeviceError(f"NVRTC, which compiles kernels, cannot be loaded ({reason}): {INSTALL}") from error
    return cuda.nvrtc


def _load_library(major: int) -> None:
    """Load NVRTC from its wheel, where CuPy 13 does not search; CuPy then finds the loaded library by name."""
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


def flags() -> tuple[str, ...]:
    """Return the flags of the compiler's version."""
    return FLAGS if nvrtc().getVersion() >= (13, 1) else (*FLAGS, UNCONVERTED)


def compile_instances(instances: Sequence[Instance], architecture: str) -> Cubin:
    """Compile instances of one source into one image.

    Raises
    ------
    DeviceError
        CuPy or NVRTC is missing, or NVRTC does not support the architecture.
    CompileError
        The compiler rejects the source.
    """
    (source,) = {each.source for each in instances}
    text, headers = with_headers(source)
    return compile_source(text, source, headers, {each.name: each.expression for each in instances}, architecture)


def compile_source(
    text: str, name: str, headers: dict[str, str], expressions: dict[str, str], architecture: str
) -> Cubin:
    """Compile a source; `expressions` maps names of the caller to the C++ names of kernels in it."""
    binding = nvrtc()
    check_architecture(architecture)
    names = [header.encode() for header in headers]
    program = binding.createProgram(text, name, [header.encode() for header in headers.values()], names)
    try:
        for expression in expressions.values():
            binding.addNameExpression(program, expression)
        try:
            binding.compileProgram(program, (f"--gpu-architecture={architecture}", *flags()))
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

    getCUBIN drops the final byte of the image as if it were the NUL at the end of a string; PTX has one, a cubin does
    not. The last bytes of a cubin are the program header table, whose last field, a 64-bit alignment, ends with a
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
