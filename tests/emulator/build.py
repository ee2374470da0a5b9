"""Compile kernels for the host: the emulator once, and the instances of the manifest into libraries.

An instance is compiled when it is first needed, and again after a change of a file that it includes, of a flag or of
the compiler: the name of the library under build/emulator has a hash of all of these. Several processes may build the
same instance at once; each writes a file of its own and renames it.

The instances of a line of bundles.txt are one library. They share most functions: six together take half of the time
that they take apart. An instance that is in no line has a library of its own. The kernels of the emulator's own tests
have one library for each source.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from pagecore.ops.cuda.compilation.manifest import Instance, parse_manifest

ROOT = Path(__file__).parents[2]
NATIVE = Path(__file__).parent / "native"
SOURCES = ROOT / "cuda_src"
PROBES = Path(__file__).parent / "kernels"
FOLDER = ROOT / "build" / "emulator"
CPU = Path("/proc/cpuinfo")
BUNDLES = Path(__file__).with_name("bundles.txt")

ASAN = os.environ.get("PAGECORE_EMULATE_ASAN", "0") == "1"
# The emulator's errors name lines without debug information, and a build that succeeds shows no warnings. Both would
# take a twelfth of a kernel's compilation.
FLAGS = ["-std=c++20", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-w"]
FLAGS += ["-fsanitize=address", "-fno-omit-frame-pointer", "-g1"] if ASAN else []
# The emulator takes most of a test's time; with the sanitizer, its compilation does.
ENGINE_FLAGS = ["-O0"] if ASAN else ["-O3", "-fno-semantic-interposition"]
# Its kernels take a tenth of a test's time: with -O2, they take twice as long to compile.
KERNEL_FLAGS = ["-Og", "-DPC_EMULATED"]
# As an instruction, a fused multiplication and addition has the same result, and takes a fraction of the time.
KERNEL_FLAGS += ["-mfma"] if re.search(r"^flags\s*:.*\bfma\b", CPU.read_text(), re.MULTILINE) else []
# Kernels throw nothing, and nothing replaces their functions: without these flags, compilation takes longer.
KERNEL_FLAGS += ["-fno-exceptions", "-fno-asynchronous-unwind-tables", "-fno-semantic-interposition"]
# Undefined behaviour ends the launch.
KERNEL_FLAGS += ["-fno-sanitize-recover"]
KERNEL_FLAGS += ["-fsanitize=bounds,shift,signed-integer-overflow,integer-divide-by-zero,unreachable,return"]
KERNEL_FLAGS += ["-ftrivial-auto-var-init=pattern"]  # uninitialised locals hold 0xFE...
# The process that loads an instance has the functions of the other libraries: to link them takes another twelfth.
LINK_FLAGS = [] if ASAN else ["-nostdlib", "-lm", "-lgcc"]
# Headers of the standard library, compiled once: read by each instance, they are a fifth of its compilation.
PRELUDE = "".join(
    f"#include <{name}>\n" for name in ("bit", "cmath", "cstdint", "cstring", "source_location", "type_traits")
)


class BuildError(RuntimeError):
    """A compiler error; the message is the output of the compiler."""


def read_manifest(sources: Path = SOURCES) -> dict[str, Instance]:
    """Return the instances of a folder's manifest by name."""
    return _by_name((sources / "manifest.toml").read_text())


@functools.cache
def _by_name(manifest: str) -> dict[str, Instance]:
    return {instance.name: instance for instance in parse_manifest(manifest)}


@functools.cache
def bundles() -> tuple[tuple[Instance, ...], ...]:
    """Return the instances that are compiled together."""
    known = read_manifest()
    return tuple(tuple(known[name] for name in line.split()) for line in BUNDLES.read_text().splitlines())


@functools.cache
def bundle_of(instance: Instance, sources: Path = SOURCES) -> tuple[Instance, ...]:
    if sources == PROBES:
        return tuple(each for each in read_manifest(PROBES).values() if each.source == instance.source)
    return next((bundle for bundle in bundles() if sources == SOURCES and instance in bundle), (instance,))


def compiler_command() -> list[str]:
    return shlex.split(os.environ.get("CXX", "g++"))


@functools.cache
def compiler_version() -> str:
    return subprocess.run([*compiler_command(), "--version"], capture_output=True, text=True, check=True).stdout


def key_of(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in (compiler_version(), *FLAGS, *KERNEL_FLAGS, *LINK_FLAGS, *parts):
        digest.update(f"{len(part)} {part}".encode())
    return digest.hexdigest()[:20]


def closure(path: Path, folders: tuple[Path, ...], seen: dict[Path, str] | None = None) -> dict[Path, str]:
    """Return the text of a file and of each file that it includes, by path."""
    seen = {} if seen is None else seen
    if path not in seen:
        seen[path] = path.read_text()
        for included in re.findall(r'^\s*#\s*include\s+"([^"]+)"', seen[path], re.MULTILINE):
            for folder in (path.parent, *folders):
                if (folder / included).is_file():
                    closure(folder / included, folders, seen)
                    break
    return seen


def partial_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.{os.getpid()}-{threading.get_ident()}.partial")


def compile_library(target: Path, arguments: list[str]) -> None:
    """Compile to a file of this process's own, and rename it to `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(target)
    command = [*compiler_command(), *FLAGS, *arguments, "-o", str(partial)]
    environment = os.environ | {"LD_PRELOAD": ""}  # a compiler with a sanitizer takes twice the time
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode:
        partial.unlink(missing_ok=True)
        raise BuildError(f"{' '.join(command)}\n{ran.stderr}")
    partial.rename(target)
    for old in target.parent.glob(f"{target.stem[: -len(key_of())]}*"):  # of older sources
        with suppress(FileNotFoundError):  # another process may rename its partial file
            if old.stat().st_mtime < time.time() - 24 * 3600:
                old.unlink()


def engine_path() -> Path:
    """Return the path of the emulator itself; build it if it is not up to date."""
    sources = sorted(NATIVE.glob("*.cpp"))
    texts = [path.name + path.read_text() for path in (*sources, *sorted(NATIVE.glob("*.hpp")))]
    path = FOLDER / f"emulator-{key_of(*ENGINE_FLAGS, *texts)}.so"
    if not path.exists():
        with TemporaryDirectory() as scratch:
            unit = Path(scratch) / "emulator.cpp"  # one unit takes two thirds of the time of all files apart
            unit.write_text("".join(f'#include "{source}"\n' for source in sources))
            compile_library(path, [*ENGINE_FLAGS, str(unit)])
    return path


def prelude_path() -> Path:
    """Return the path of the headers that every instance begins with; compile them if they are not up to date."""
    header = FOLDER / f"prelude-{key_of(PRELUDE)}"
    compiled = header.with_suffix(".gch")
    if not (header.exists() and compiled.exists()):
        with TemporaryDirectory() as scratch:
            unit = Path(scratch) / header.name
            unit.write_text(PRELUDE)
            compile_library(compiled, [*KERNEL_FLAGS, "-x", "c++-header", str(unit)])
            shutil.copy(unit, partial_of(header)).rename(header)
    return header


def symbol_of(instance: Instance) -> str:
    """Return the name of the description of an instance in its library."""
    return "pc_instance_" + re.sub("[^A-Za-z0-9]", "_", instance.name)


def declared_threads(instance: Instance, source: str) -> str:
    """Return the declaration of the number of threads of a kernel.

    The number may depend on template parameters, so that it becomes a template of its own.
    """
    head, bounds = r"(?P<head>template\s*<[^;{}]*>\s*)?", r"PC_KERNEL\((?P<bounds>[^;{}]*)\)\s*"
    declared = re.search(rf"{head}{bounds}void\s+{instance.entry}\s*\(", source)
    if declared is None:
        raise BuildError(f"{instance.source} has no PC_KERNEL(threads, blocks) void {instance.entry}(...)")
    return f"{declared['head'] or ''}constexpr int {instance.entry}_threads = first_of({declared['bounds']});"


def unit_text(together: Sequence[Instance], source: str) -> str:
    """Return the translation unit of instances of a source: the source, and each kernel with its number of threads."""
    head = [f'#include "{together[0].source}"', '#include "instance.hpp"', "namespace pagecore {"]
    lines = [*head, "using emulator::first_of;"]
    lines += {each.entry: declared_threads(each, source) for each in together}.values()
    for each in together:
        threads = each.name.replace(each.entry, f"{each.entry}_threads", 1)
        lines.append(f"PC_INSTANCE({symbol_of(each)}, ({threads}), ({each.name}));")
    return "\n".join([*lines, "}"])


def library_key(together: Sequence[Instance], include: tuple[Path, ...]) -> str:
    """Return the digest of all files that instances, whose source is in the first folder, depend on."""
    texts = closure(include[0] / together[0].source, include) | closure(NATIVE / "instance.hpp", include)
    names = [each.name for each in together]
    return key_of(*names, *sorted(path.name + text for path, text in texts.items()))


@functools.cache
def own_key(together: tuple[Instance, ...]) -> str:
    """Return the key of instances of cuda_src, whose files do not change while tests run."""
    return library_key(together, (SOURCES, ROOT, NATIVE))


def instance_path(instance: Instance, sources: Path = SOURCES, folder: Path = FOLDER) -> Path:
    """Return the path of the library of an instance; build it if it is not up to date.

    A copy of cuda_src has this name, so that its includes are found in it. If no file of an instance has a planted
    fault, the instance is that of the kernels without faults. Otherwise it is compiled alone.
    """
    include = (sources, sources.parent, ROOT, NATIVE)
    together = bundle_of(instance, sources)
    key = own_key(together) if sources == SOURCES else library_key(together, include)
    if sources != SOURCES and (SOURCES / instance.source).is_file() and key == own_key(together):
        return instance_path(instance)
    path = folder / f"{re.sub('[^A-Za-z0-9_]+', '-', together[0].name).strip('-')}-{key}.so"
    if not path.exists():
        with TemporaryDirectory() as scratch:
            unit = Path(scratch) / "instance.cpp"
            unit.write_text(unit_text(together, (sources / instance.source).read_text()))
            folders = [f"-I{folder}" for folder in include]
            compile_library(path, [*KERNEL_FLAGS, *folders, "-include", str(prelude_path()), str(unit), *LINK_FLAGS])
    return path


def build_all(instances: Iterable[Instance]) -> None:
    """Build libraries of cuda_src in parallel, one on each core."""
    libraries = {bundle_of(instance): instance for instance in instances}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(instance_path, libraries.values()):
            pass


@functools.cache
def engine() -> ctypes.CDLL:
    """Load the emulator, and return it; instances link to its functions."""
    if ASAN and "libasan" not in os.environ.get("LD_PRELOAD", ""):
        raise BuildError(
            "PAGECORE_EMULATE_ASAN=1 needs the sanitizer loaded before Python: "
            "run with LD_PRELOAD=$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0"
        )
    library = ctypes.CDLL(str(engine_path()), mode=ctypes.RTLD_GLOBAL)
    library.pc_allocate.restype = ctypes.c_uint64
    library.pc_allocate.argtypes = [ctypes.c_uint64]
    library.pc_release.argtypes = [ctypes.c_uint64]
    library.pc_add_host_memory.argtypes = [ctypes.c_uint64, ctypes.c_uint64]
    library.pc_add_host_memory.restype = None
    library.pc_plant.argtypes = [ctypes.c_int]
    library.pc_plant.restype = None
    library.pc_is_device.argtypes = [ctypes.c_uint64]
    library.pc_check_memory.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_char_p, ctypes.c_uint64]
    library.pc_launch.argtypes = [
        ctypes.c_char_p,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.POINTER(ctypes.c_int),
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_int,
        ctypes.c_uint64,
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_uint64,
    ]
    return library


if __name__ == "__main__":  # python -m tests.emulator.build [part of a name]
    part = sys.argv[1] if len(sys.argv) > 1 else ""
    engine_path()
    build_all(instance for name, instance in read_manifest().items() if part in name)
