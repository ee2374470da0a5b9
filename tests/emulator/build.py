"""Builds kernels for the host: the emulator once, and each instance of the manifest as a library of its own.

An instance is compiled when it is first asked for, and again when any file that it includes, a flag or the compiler has
changed: all of that is part of the file's name under build/emulator. Processes may build the same one at a time; each
writes a file of its own and renames it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import re
import subprocess
import tomllib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
NATIVE = Path(__file__).parent / "native"
SOURCES = ROOT / "cuda_src"
FOLDER = ROOT / "build" / "emulator"

ASAN = os.environ.get("PAGECORE_EMULATE_ASAN", "0") == "1"
FLAGS = ["-std=c++20", "-fPIC", "-shared", "-g1", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra"]
FLAGS += ["-O1", "-fsanitize=address", "-fno-omit-frame-pointer"] if ASAN else ["-O2"]


class BuildError(RuntimeError):
    """The compiler refused; the message is its own."""


@dataclass(frozen=True)
class Instance:
    """A kernel to be compiled: ``entry<argument,...>`` of one source."""

    entry: str
    source: str
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.entry}<{','.join(self.arguments)}>" if self.arguments else self.entry


def read_manifest(sources: Path = SOURCES) -> dict[str, Instance]:
    """Return all instances of a folder's manifest by name."""
    kernels = tomllib.loads((sources / "manifest.toml").read_text()).get("kernel", [])
    found = [
        Instance(kernel["entry"], kernel["source"], tuple(str(value) for value in values))
        for kernel in kernels
        for values in itertools.product(*kernel.get("values", []))
    ]
    return {instance.name: instance for instance in found}


@functools.cache
def compiler() -> tuple[str, str]:
    """Return the compiler's name and its version."""
    name = os.environ.get("CXX", "g++")
    return name, subprocess.run([name, "--version"], capture_output=True, text=True, check=True).stdout


def key_of(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in (compiler()[1], *FLAGS, *parts):
        digest.update(f"{len(part)} {part}".encode())
    return digest.hexdigest()[:20]


def closure(path: Path, folders: tuple[Path, ...], seen: dict[Path, str] | None = None) -> dict[Path, str]:
    """Return the texts of a file and of all that it includes by name."""
    seen = {} if seen is None else seen
    if path not in seen:
        seen[path] = path.read_text()
        for included in re.findall(r'^\s*#\s*include\s+"([^"]+)"', seen[path], re.MULTILINE):
            for folder in (path.parent, *folders):
                if (folder / included).is_file():
                    closure(folder / included, folders, seen)
                    break
    return seen


def compile_library(target: Path, arguments: list[str]) -> None:
    """Compile to a file of this process's own, which then takes the target's name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    command = [compiler()[0], *FLAGS, *arguments, "-o", str(partial)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        partial.unlink(missing_ok=True)
        raise BuildError(f"{' '.join(command)}\n{ran.stderr}")
    partial.rename(target)


def engine_path() -> Path:
    """Build the emulator itself where it is not up to date."""
    sources = sorted(NATIVE.glob("*.cpp"))
    texts = [path.name + path.read_text() for path in (*sources, *sorted(NATIVE.glob("*.hpp")))]
    path = FOLDER / f"emulator-{key_of(*texts)}.so"
    if not path.exists():
        compile_library(path, ["-O3", *(str(source) for source in sources)])
    return path


def instance_path(instance: Instance, sources: Path = SOURCES, folder: Path = FOLDER) -> Path:
    """Build one instance where it is not up to date."""
    include = (sources, SOURCES, NATIVE)
    texts = closure(sources / instance.source, include) | closure(NATIVE / "instance.hpp", include)
    key = key_of(instance.name, *(path.name + text for path, text in sorted(texts.items())))
    path = folder / f"{re.sub('[^A-Za-z0-9_]+', '-', instance.name).strip('-')}-{key}.so"
    if not path.exists():
        with TemporaryDirectory() as scratch:
            unit = Path(scratch) / "instance.cpp"
            unit.write_text(
                f'#include "{instance.source}"\n#include "instance.hpp"\nPC_INSTANCE((pagecore::{instance.name}));\n'
            )
            options = ["-DPC_EMULATED", *(f"-I{folder}" for folder in include)]
            compile_library(path, [*options, str(unit)])
    return path


@functools.cache
def engine() -> ctypes.CDLL:
    """The emulator, loaded; instances find its functions in it."""
    if ASAN and "libasan" not in os.environ.get("LD_PRELOAD", ""):
        raise BuildError(
            "PAGECORE_EMULATE_ASAN=1 wants the sanitizer loaded before Python: "
            "run with LD_PRELOAD=$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0"
        )
    library = ctypes.CDLL(str(engine_path()), mode=ctypes.RTLD_GLOBAL)
    library.pc_allocate.restype = ctypes.c_uint64
    library.pc_allocate.argtypes = [ctypes.c_uint64]
    library.pc_release.argtypes = [ctypes.c_uint64]
    library.pc_add_region.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    library.pc_add_region.restype = None
    library.pc_is_device.argtypes = [ctypes.c_uint64]
    library.pc_check_region.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint64]
    library.pc_launch.argtypes = [
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_int),
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_uint64,
        ctypes.c_char_p,
        ctypes.c_uint64,
    ]
    return library
