"""The native parts of pagecore: one static library for each folder of C++, one extension for each ``_name.pyx``.

A ``_name.pyx`` includes the other Cython sources of its folder, ``.pxi`` files: a module of its own for each would take
three times as long to compile.
"""

import gc
import itertools
import os
import platform
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING

import Cython
from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_clib import build_clib
from setuptools.command.build_ext import build_ext

if TYPE_CHECKING:
    from collections.abc import Iterable
    from concurrent.futures import Future
    from distutils.ccompiler import CCompiler as Compiler

ROOT = Path(__file__).parent
INCLUDE = [".", "third_party"]
WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi"]
# No debug information in what ships: it is six sevenths of the bytes. PAGECORE_CXXFLAGS=-g brings it back.
CXX = ["-O3", "-g0", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", *WARNINGS]
CXX += os.environ.get("PAGECORE_CXXFLAGS", "").split()
# Beyond 128 MB, the compiler would collect its garbage. Without, these files take a tenth less time and up to 380 MB;
# kernels would take 700 MB, and gain less.
NO_GARBAGE = ["--param=ggc-min-heapsize=1000000"]
# Generated C++ is not ours to warn about. With -Og, which inlines only functions declared inline, a step takes 1.4
# times as long (python -m bench prepare).
GENERATED = ["-O2", "-w", *NO_GARBAGE]
# Headers of the standard library, compiled once for each kind of source; a compiler that cannot use the compiled header
# includes this one.
STANDARD_HEADERS = (
    *("<algorithm>", "<array>", "<atomic>", "<bit>", "<chrono>", "<cmath>", "<compare>", "<condition_variable>"),
    *("<cstddef>", "<cstdint>", "<cstdio>", "<cstdlib>", "<cstring>", "<exception>", "<ios>", "<limits>", "<map>"),
    *("<memory>", "<mutex>", "<new>", "<optional>", "<span>", "<sstream>", "<stdexcept>", "<string>"),
    *("<string_view>", "<thread>", "<tuple>", "<type_traits>", "<typeinfo>", "<unordered_map>", "<utility>"),
    "<vector>",
)
GENERATED_HEADERS = (
    *("<Python.h>", "<frameobject.h>", "<pythread.h>", "<structmember.h>", *STANDARD_HEADERS),
    *(f'"pagecore/{name}.hpp"' for name in ("native/translate", "arrays/views/array_view", "arrays/dtypes/dtype")),
)
# Inline functions of a header are instantiated again by each file that begins with it, used or not: each prelude has
# only headers of its rooms.
PRELUDES = {
    "standard": STANDARD_HEADERS,
    "arrays": (
        *GENERATED_HEADERS,
        *(f'"pagecore/ops/{name}.hpp"' for name in ("args", "format", "plan", "tree", "cuda/plan/cuda_plan")),
        *(
            f'"pagecore/ops/cpu/{name}.hpp"'
            for name in (
                *("codec", "codecs/conversions", "codecs/state_codec", "dispatch", "host_calls", "latent/latent"),
                *("moves/slot_moves", "ops", "sparse/select"),
            )
        ),
    ),
    "index": (
        *GENERATED_HEADERS,
        *(
            f'"pagecore/index/{name}.hpp"'
            for name in (
                *("pools/block_pool", "radix/tree/journal", "radix/tree/tree", "slots", "states/state_table"),
                "tables/block_tables",
            )
        ),
        '"pagecore/cache/state/state_lock.hpp"',
    ),
}
ROOMS_ON_INDEX = {"index", "cache", "tiers"}
CORES = len(os.sched_getaffinity(0))  # that this process may use
# Code that Cython repeats in every module unless one module holds it: memory views are half of most modules.
SHARED = "pagecore._cython"
# As in pyproject.toml, which says why; a build without isolation does not look there.
CYTHON_LEAST, CYTHON_BELOW = "3.2", "3.3"
CYTHON_OPTIONS = {
    "language_level": 3,
    # Without its own pickling, an object that holds native memory is refused by pickle and copy.
    "compiler_directives": {"embedsignature": True, "binding": True, "auto_pickle": False},
    "shared_utility_qualified_name": SHARED,
}
# The version and options of Cython with which the files in build/cython were generated.
CYTHON_STAMP = "build/cython_options.txt"

# As in tests/native/sanitize.mk.
X86_LEVELS = {
    "v2": ["-march=x86-64-v2"],
    "v3": ["-march=x86-64-v3"],
    "v4": ["-march=x86-64-v4"],
    "v4_bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni"],
    "v4_amx": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi", "-mavx512vnni"],
}
# Kernels throw nothing; with exceptions they could refer to their personality, a function outside the unit.
KERNEL_FLAGS = ["-ffp-contract=fast", "-fno-exceptions"]
ISA_FLAGS = X86_LEVELS if platform.machine() in {"x86_64", "AMD64"} else {"neon": ["-march=armv8-a"]}
# Features that a level needs beyond those of the level before, as /proc/cpuinfo names them; see ops/cpu/dispatch.cpp.
X86_FEATURES = {
    "v2": {"sse4_2", "popcnt"},
    "v3": {"avx2", "bmi1", "bmi2", "fma", "f16c"},
    "v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
    "v4_bf16": {"avx512_bf16", "avx512vbmi", "avx512_vnni"},
    "v4_amx": {"amx_tile", "amx_bf16"},
}
# Features of x86-64-v4-vnni, which has the kernels of v4_bf16 without products of bfloat16, and others of v4.
VNNI_FEATURES = X86_FEATURES["v4"] | {"avx512vbmi", "avx512_vnni"}
# Values of PAGECORE_BUILD_ISA, and the flags of kernels that "local" does not optimise.
BUILDS = ("all", "native", "local")
UNOPTIMISED = ["-Og"]
# Null tables of the instruction sets that a build leaves out.
ABSENT = "build/absent_isas.cpp"

# Sources that are compiled as one file, in half the time: each alone would instantiate the same templates of the
# standard library. They have no private names in common, and an extension that links one of them links all. Insertions
# into the tree, compiled with the rest of it, take a sixth longer: the compiler then inlines other calls.
JOINED = {
    "build/block_tables.cpp": ("pagecore/index/tables/block_tables*.cpp",),
    "build/state_table.cpp": ("pagecore/index/states/state_table*.cpp",),
    "build/radix_nodes.cpp": ("pagecore/index/radix/nodes/*.cpp",),
    "build/radix_tree.cpp": ("pagecore/index/radix/tree/tree*.cpp",),
    "build/cpu.cpp": ("pagecore/ops/cpu/*.cpp", "pagecore/ops/cpu/*/*.cpp"),
}
# Each instruction set has flags of its own. The drivers of tests/native compile dispatch.cpp again, to emulate AMX, and
# wrap the function that it defines.
ALONE = ("pagecore/ops/cpu/dispatch.cpp", "pagecore/ops/cpu/isa/*.cpp")

# The other rooms whose headers a room's native code includes; every room includes its own and native's. Checked by
# tests/test_house.py.
BELOW = {
    "arrays": (),
    "index": (),
    "ops": ("arrays",),
    "cache": ("arrays", "index", "ops"),
    "tiers": ("arrays", "cache", "index", "ops"),
    "serving": (),
    "interop": ("arrays", "ops"),
}


def sources(pattern: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))


def prelude(name: str) -> str:
    return f"build/prelude_{name}.hpp"


def headers_of(rooms: "Iterable[str]") -> list[str]:
    """Return the headers of rooms, and those outside of rooms."""
    own = [header for room in rooms for header in sources(f"pagecore/{room}/**/*.hpp")]
    return [*own, *sources("cuda_src/**/*.h"), *sources("third_party/*.h")]


def compiled_from(room: str) -> list[str]:
    """Return the dependencies of a room's native code other than its sources: reachable headers, and setup.py."""
    return ["setup.py", *headers_of(("native", room, *BELOW[room]))]


def library(room: str, name: str, files: list[str], flags: list[str]) -> tuple[str, dict[str, object]]:
    info = {"sources": files, "include_dirs": INCLUDE, "cflags": flags, "depends": compiled_from(room)}
    return f"pagecore_{name}", info


def units(files: list[str]) -> dict[str, list[str]]:
    """Return the files to compile, and the sources in each: those of an entry of JOINED are in one file."""

    def matches(file: str, patterns: tuple[str, ...]) -> bool:
        return any(Path(file).match(pattern) for pattern in patterns)

    found: dict[str, list[str]] = {}
    for file in files:
        joined = () if matches(file, ALONE) else (unit for unit, parts in JOINED.items() if matches(file, parts))
        found.setdefault(next(iter(joined), file), []).append(file)
    return found


def write_changed(name: str, text: str) -> None:
    """Write a file, unless it is there with this text."""
    path = ROOT / name
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def write_joined(unit: str, files: list[str]) -> None:
    """Write a file that includes other sources, unless it is there."""
    write_changed(unit, "".join(f'#include "{file}"\n' for file in files))


def features(cpuinfo: str) -> set[str] | None:
    """Return the features of the processor; None if the system does not list them."""
    found = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return None if found is None or ISA_FLAGS is not X86_LEVELS else set(found[1].split())


def supported_isas(cpuinfo: str) -> list[str]:
    """Return the instruction sets with kernels that the processor can run, all if its features are unknown."""
    flags = features(cpuinfo)
    if flags is None:
        return list(ISA_FLAGS)
    supported = list(itertools.takewhile(lambda isa: X86_FEATURES[isa] <= flags, X86_FEATURES))
    return [*supported, "v4_bf16"] if supported[-1:] == ["v4"] and flags >= VNNI_FEATURES else supported


def native_isas(cpuinfo: str) -> list[str]:
    """Return the instruction set that the processor gets by default (dispatch.cpp), and the one that it extends.

    Return all of them if the system does not list the features.
    """
    flags = features(cpuinfo)
    if flags is None:
        return list(ISA_FLAGS)
    supported = supported_isas(cpuinfo)
    if "v4_amx" in supported:
        return ["v4_bf16", "v4_amx"]
    if "v4_bf16" in supported and (not flags >= X86_FEATURES["v4_bf16"] or "GenuineIntel" in cpuinfo):
        return ["v4", "v4_bf16"]  # x86-64-v4-vnni
    return supported[-1:]


def built_isas() -> dict[str, list[str]]:
    """Return the instruction sets to build, and the flags of each.

    They are all, unless PAGECORE_BUILD_ISA is "native": those of this processor; or "local": all, but those that this
    processor cannot run are not optimised, which takes a third of the time. Neither is for other machines.
    """
    wanted = os.environ.get("PAGECORE_BUILD_ISA", "all")
    if wanted not in BUILDS:
        names = ", ".join(f'"{each}"' for each in BUILDS)
        raise SystemExit(f'expected PAGECORE_BUILD_ISA to be one of {names}, got "{wanted}"')
    file = Path("/proc/cpuinfo")
    cpuinfo = file.read_text() if wanted != "all" and file.exists() else ""
    if wanted == "native":
        return {isa: ISA_FLAGS[isa] for isa in native_isas(cpuinfo)}
    supported = supported_isas(cpuinfo)
    return {isa: flags if isa in supported else [*flags, *UNOPTIMISED] for isa, flags in ISA_FLAGS.items()}


def write_absent(isas: dict[str, list[str]]) -> None:
    """Write the tables of instruction sets that a build leaves out; the file changes with the flags of the others."""
    absent = [f"{isa}::kTable" for isa in ISA_FLAGS if isa not in isas]
    if "v4_bf16::kTable" in absent:
        absent.append("v4_bf16::kTableWithoutPairs")
    tables = "".join(f"const KernelTable {table}{{}};\n" for table in absent)
    flags = "".join(f"// {isa}: {' '.join(each)}\n" for isa, each in isas.items())
    include = '#include "pagecore/ops/cpu/kernel_table.hpp"'
    write_changed(ABSENT, f"{flags}{include}\n\nnamespace pagecore::cpu {{\n{tables}}}\n")


def folder_libraries(isas: dict[str, list[str]]) -> list[tuple[str, dict[str, object]]]:
    """One library for each folder; the kernels of ops/cpu once more for each instruction set."""
    flags = [*CXX, *NO_GARBAGE, "-include", prelude("standard")]
    built = [library("index", "index", sources("pagecore/index/**/*.cpp"), flags)]
    built.append(library("tiers", "tiers", sources("pagecore/tiers/**/*.cpp"), flags))
    # The linker reads libraries in order: the kernels come after the dispatcher that names them.
    host = [file for file in sources("pagecore/ops/cpu/**/*.cpp") if "/isa/" not in file]
    built.append(library("ops", "cpu", host, flags))
    for isa, own in isas.items():
        files = [f"pagecore/ops/cpu/isa/{isa}.cpp", f"pagecore/ops/cpu/isa/latent_{isa}.cpp"]
        built.append(library("ops", f"cpu_{isa}", files, [*CXX, *own, *KERNEL_FLAGS]))
    built.append(library("ops", "cpu_absent", [ABSENT], CXX))
    return [(name, info) for name, info in built if info["sources"]]


def extension(pyx: str) -> Extension:
    """The extension of one ``_name.pyx``; it is linked again when its folder's C++ changes, which is in its library."""
    module = pyx.removesuffix(".pyx").replace("/", ".")
    folder = pyx.rsplit("/", 1)[0]
    room = folder.split("/")[1]
    linked = "pagecore/index" if room == "index" else folder  # the folders of index are one library
    depends = [*compiled_from(room), *sources(f"{linked}/**/*.cpp")]
    if folder == "pagecore/ops/cpu":
        depends.append(ABSENT)
    flags = [*CXX, *GENERATED, "-include", prelude("index" if room in ROOMS_ON_INDEX else "arrays")]
    return Extension(module, [pyx], language="c++", include_dirs=INCLUDE, depends=depends, extra_compile_args=flags)


def remove_extensions_without_source(suffix: str) -> None:
    """Remove extensions that were built in place from sources that are gone, such as those of a folder that moved."""
    for path in ROOT.glob(f"pagecore/*/**/_*{suffix}"):  # SHARED, which has no source, is in none of the folders
        if not path.with_name(f"{path.name.removesuffix(suffix)}.pyx").exists():
            path.unlink()


def modified(path: str | Path) -> float:
    """Return the time of the last change of a file; 0 if it does not exist."""
    return (ROOT / path).stat().st_mtime if (ROOT / path).exists() else 0.0


def compile_prelude(name: str, compiler: "Compiler", flags: list[str]) -> None:
    """Compile the headers of a prelude, unless the compiled header is newer than every header that it may include."""
    header = Path(prelude(name))
    includes = [f"-I{folder}" for folder in (*INCLUDE, *compiler.include_dirs)]
    command = [*compiler.compiler_so_cxx, *includes, *flags, "-x", "c++-header", str(header)]
    text = f"// {' '.join(command)}\n"
    if "<Python.h>" in PRELUDES[name]:
        text += "#define PY_SSIZE_T_CLEAN\n"
    text += "".join(f"#include {each}\n" for each in PRELUDES[name])
    (ROOT / header).parent.mkdir(exist_ok=True)
    if not (ROOT / header).exists() or (ROOT / header).read_text() != text:
        (ROOT / header).write_text(text)
    depends: list[str | Path] = [header]
    if any(each.startswith('"') for each in PRELUDES[name]):
        depends += headers_of(("native", *BELOW))
    if modified(f"{header}.gch") < max(map(modified, depends)):
        # Neither a build that is interrupted nor one that runs at the same time leaves a partial header there.
        part = f"{header}.{os.getpid()}.part"
        subprocess.run([*command, "-o", part], cwd=ROOT, check=True)
        (ROOT / part).replace(ROOT / f"{header}.gch")


class BuildLibraries(build_clib):
    """``build_clib`` with the option -j of ``build_ext``: files are compiled at the same time, the longest first."""

    user_options = [*build_clib.user_options, ("parallel=", "j", "number of files to compile at the same time")]  # noqa: RUF012

    def initialize_options(self) -> None:
        super().initialize_options()
        self.parallel = None

    def finalize_options(self) -> None:
        super().finalize_options()
        self.set_undefined_options("build", ("parallel", "parallel"))
        self.parallel = self.parallel or CORES

    def build_libraries(self, libraries: list[tuple[str, dict[str, object]]]) -> None:
        files = [(unit, parts, info) for _, info in libraries for unit, parts in units(info["sources"]).items()]
        kernels = [each for each in files if "/isa/" in each[0]]
        joined = [each for each in files if len(each[1]) > 1]
        others = [each for each in files if each not in kernels and each not in joined]
        with ThreadPoolExecutor(int(self.parallel)) as pool:
            # Kernels have flags of their own, and do not wait for the prelude of the others.
            header = pool.submit(compile_prelude, "standard", self.compiler, [*CXX, *NO_GARBAGE])
            objects = dict(pool.map(self.compile_one, [*kernels, *joined, *others], repeat(header)))
        for name, info in libraries:
            Path(self.build_clib, f"lib{name}.a").unlink(missing_ok=True)  # it keeps objects whose sources are gone
            self.compiler.create_static_lib([objects[unit] for unit in units(info["sources"])], name, self.build_clib)

    def compile_one(self, file: tuple[str, list[str], dict[str, object]], header: "Future[None]") -> tuple[str, str]:
        """Compile one file unless its object is newer than all that it depends on; return both names."""
        unit, parts, info = file
        if parts != [unit]:
            write_joined(unit, parts)
        if prelude("standard") in info["cflags"]:
            header.result()
        # A later build with optimisation must not find the objects of one without.
        folder = os.path.join(self.build_temp, "unoptimised" if UNOPTIMISED[0] in info["cflags"] else "")
        (made,) = self.compiler.object_filenames([unit], output_dir=folder)
        if modified(made) < max(map(modified, (unit, *parts, *info["depends"]))):
            options = {"include_dirs": info["include_dirs"], "extra_postargs": info["cflags"]}
            self.compiler.compile([unit], folder, **options)
        return unit, made


class BuildExtensions(build_ext):
    """``build_ext`` on all cores, with the preludes compiled before the extensions that begin with them."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or CORES

    def build_extensions(self) -> None:
        with ThreadPoolExecutor(int(self.parallel)) as pool:
            preludes = ("arrays", "index")
            list(pool.map(lambda name: compile_prelude(name, self.compiler, [*CXX, *GENERATED]), preludes))
        super().build_extensions()

    def copy_extensions_to_source(self) -> None:  # by a build in place
        super().copy_extensions_to_source()
        remove_extensions_without_source(self.get_ext_filename(""))


def check_cython(version: str) -> None:
    """Refuse versions of Cython that pyproject.toml excludes, but for pre-releases of the first that it allows."""

    def numbers(text: str) -> list[int]:
        return [int(each) for each in re.findall(r"\d+", text)[:2]]

    if not numbers(CYTHON_LEAST) <= numbers(version) < numbers(CYTHON_BELOW):
        wanted = f"cython>={CYTHON_LEAST},<{CYTHON_BELOW}"
        raise SystemExit(
            f"Cython {version} is installed, expected {CYTHON_LEAST} or later and below {CYTHON_BELOW}: install it by "
            f"pip install '{wanted}', or let pip do so in an isolated build, without --no-build-isolation"
        )


def generate(extensions: list[Extension]) -> list[Extension]:
    """Generate the C++ of the extensions that have changed, and of all if Cython or its options have changed."""
    stamp, text = ROOT / CYTHON_STAMP, f"{Cython.__version__} {CYTHON_OPTIONS}\n"
    is_stale = not stamp.exists() or stamp.read_text() != text
    if is_stale:
        stamp.unlink(missing_ok=True)  # first: a generation that fails leaves files of these options
    # To look for garbage among the syntax trees of all modules takes half of the time. Without, they need 800 MB.
    gc.disable()
    try:
        # None: as the environment says.
        made = cythonize(extensions, build_dir="build/cython", nthreads=CORES, force=is_stale or None, **CYTHON_OPTIONS)
    finally:
        gc.enable()
    write_changed(CYTHON_STAMP, text)
    return made


def native_parts() -> dict[str, object]:
    """Nothing where the Makefile, which builds them in place, installs the tree: pip would compile them once more."""
    if os.environ.get("PAGECORE_PREBUILT") == "1":
        return {}
    check_cython(Cython.__version__)
    isas = built_isas()
    write_absent(isas)
    # Of the shared module, which is C, cythonize wants the name and no language.
    shared = Extension(SHARED, [f"{SHARED.replace('.', '/')}.c"], extra_compile_args=["-O1", "-g0", "-w", *NO_GARBAGE])
    extensions = generate([shared, *(extension(pyx) for pyx in sources("pagecore/**/_*.pyx"))])
    return {"libraries": folder_libraries(isas), "ext_modules": extensions}


def data_packages() -> list[str]:
    """Return the folders without Python whose sources are installed: to setuptools, only packages have data."""
    kernels = {Path("pagecore", path) for path in sources("cuda_src/**/")}
    headers = {Path(path).parent for path in sources("pagecore/**/*.hpp") if "/kernels/" not in path}
    without_python = {each for each in headers if not (ROOT / each / "__init__.py").exists()}
    return sorted(".".join(each.parts) for each in kernels | without_python)


if __name__ == "__main__":
    setup(
        package_dir={"pagecore": "pagecore", "pagecore.cuda_src": "cuda_src"},
        packages=[
            *(
                path.parent.relative_to(ROOT).as_posix().replace("/", ".")
                for path in ROOT.glob("pagecore/**/__init__.py")
            ),
            *data_packages(),
        ],
        cmdclass={"build_clib": BuildLibraries, "build_ext": BuildExtensions},
        **native_parts(),
    )
