"""The native parts of pagecore: one static library for each folder of C++, one extension for each ``_name.pyx``."""

import os
import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_clib import build_clib
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
INCLUDE = [".", "third_party"]
WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi"]
# No debug information in what ships: it is six sevenths of the bytes. PAGECORE_CXXFLAGS=-g brings it back.
CXX = ["-O3", "-g0", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-math-errno", *WARNINGS]
CXX += os.environ.get("PAGECORE_CXXFLAGS", "").split()
# Generated C++ is not ours to warn about. It calls the libraries, which hold the loops: -O2 compiles it for longer,
# and a step takes as long.
GENERATED = ["-O1", "-w"]
# Headers that nearly all generated files include, compiled once for all of them: half of the time of each. A compiler
# that cannot use the compiled header includes this one.
PRELUDE = "build/prelude.hpp"
PRELUDE_HEADERS = (
    *("<Python.h>", "<frameobject.h>", "<pythread.h>", "<structmember.h>"),
    *("<algorithm>", "<array>", "<atomic>", "<bit>", "<chrono>", "<cmath>", "<compare>", "<condition_variable>"),
    *("<cstddef>", "<cstdint>", "<cstdio>", "<cstdlib>", "<cstring>", "<exception>", "<ios>", "<limits>", "<map>"),
    *("<memory>", "<mutex>", "<new>", "<optional>", "<span>", "<sstream>", "<stdexcept>", "<string>"),
    *("<string_view>", "<thread>", "<tuple>", "<type_traits>", "<typeinfo>", "<unordered_map>", "<utility>"),
    *("<vector>", '"pagecore/native/translate.hpp"'),
    *(f'"pagecore/arrays/{name}.hpp"' for name in ("array_view", "dtype")),
    *(
        f'"pagecore/index/{name}.hpp"'
        for name in ("block_pool", "block_tables", "radix/journal", "radix/tree", "slots", "state_table")
    ),
    *(f'"pagecore/ops/{name}.hpp"' for name in ("args", "format", "plan", "tree", "cuda/cuda_plan")),
    *(
        f'"pagecore/ops/cpu/{name}.hpp"'
        for name in (
            *("codec", "conversions", "dispatch", "host_calls", "latent", "ops", "select", "slot_moves", "state_codec"),
        )
    ),
    '"pagecore/cache/state_lock.hpp"',
)
# Code that Cython repeats in every module unless one module holds it: memory views are half of most modules.
SHARED = "pagecore._cython"

# As in tests/native/sanitize.mk.
X86_LEVELS = {
    "v2": ["-march=x86-64-v2"],
    "v3": ["-march=x86-64-v3"],
    "v4": ["-march=x86-64-v4"],
    "v4_bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi"],
    "v4_amx": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi"],
}
ISA_FLAGS = X86_LEVELS if platform.machine() in {"x86_64", "AMD64"} else {"neon": ["-march=armv8-a"]}

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


def compiled_from(room: str) -> list[str]:
    """Return the dependencies of a room's native code other than its sources: reachable headers, and setup.py."""
    rooms = ("native", room, *BELOW[room])
    headers = [header for each in rooms for header in sources(f"pagecore/{each}/**/*.hpp")]
    return ["setup.py", *headers, *sources("cuda_src/*.h"), *sources("third_party/*.h")]


def library(room: str, name: str, files: list[str], flags: list[str]) -> tuple[str, dict[str, object]]:
    info = {"sources": files, "include_dirs": INCLUDE, "cflags": flags, "obj_deps": {"": compiled_from(room)}}
    return f"pagecore_{name}", info


def folder_libraries() -> list[tuple[str, dict[str, object]]]:
    """One library for each folder; the kernels of ops/cpu once more for each instruction set."""
    built = [library("index", "index", sources("pagecore/index/**/*.cpp"), CXX)]
    built.append(library("tiers", "tiers", sources("pagecore/tiers/**/*.cpp"), CXX))
    # The linker reads libraries in order: the kernels come after the dispatcher that names them.
    built.append(library("ops", "cpu", sources("pagecore/ops/cpu/*.cpp"), CXX))
    for isa, march in ISA_FLAGS.items():
        flags = [*CXX, *march, "-ffp-contract=fast"]
        files = [f"pagecore/ops/cpu/isa/{isa}.cpp", f"pagecore/ops/cpu/isa/latent_{isa}.cpp"]
        built.append(library("ops", f"cpu_{isa}", files, flags))
    return [(name, info) for name, info in built if info["sources"]]


def extension(pyx: str) -> Extension:
    """The extension of one ``_name.pyx``; it is linked again when its folder's C++ changes, which is in its library."""
    module = pyx.removesuffix(".pyx").replace("/", ".")
    folder = pyx.rsplit("/", 1)[0]
    depends = [*compiled_from(folder.split("/")[1]), *sources(f"{folder}/**/*.cpp")]
    flags = [*CXX, *GENERATED, "-include", PRELUDE]
    return Extension(module, [pyx], language="c++", include_dirs=INCLUDE, depends=depends, extra_compile_args=flags)


class BuildLibraries(build_clib):
    """``build_clib`` with the option -j of ``build_ext``: libraries are built at the same time."""

    user_options = [*build_clib.user_options, ("parallel=", "j", "number of libraries to build at the same time")]  # noqa: RUF012

    def initialize_options(self) -> None:
        super().initialize_options()
        self.parallel = None

    def finalize_options(self) -> None:
        super().finalize_options()
        self.set_undefined_options("build", ("parallel", "parallel"))

    def build_libraries(self, libraries: list[tuple[str, dict[str, object]]]) -> None:
        build_one = super().build_libraries
        for name, _ in libraries:  # an archive keeps objects whose sources are gone
            Path(self.build_clib, f"lib{name}.a").unlink(missing_ok=True)
        with ThreadPoolExecutor(int(self.parallel or 1)) as pool:
            list(pool.map(lambda each: build_one([each]), libraries))


class BuildExtensions(build_ext):
    """``build_ext`` with the headers of the prelude compiled before the extensions that begin with them."""

    def build_extensions(self) -> None:
        header, compiled = ROOT / PRELUDE, ROOT / f"{PRELUDE}.gch"
        flags = [*CXX, *GENERATED, "-x", "c++-header", PRELUDE]  # those of an extension
        includes = [f"-I{folder}" for folder in (*INCLUDE, *self.compiler.include_dirs)]
        command = [*self.compiler.compiler_so_cxx, *includes, *flags]
        text = f"// {' '.join(command)}\n#define PY_SSIZE_T_CLEAN\n"
        text += "".join(f"#include {name}\n" for name in PRELUDE_HEADERS)
        header.parent.mkdir(exist_ok=True)
        if not header.exists() or header.read_text() != text:
            header.write_text(text)
        depends = (PRELUDE, *sources("pagecore/**/*.hpp"), *sources("cuda_src/*.h"))
        if not compiled.exists() or compiled.stat().st_mtime < max((ROOT / each).stat().st_mtime for each in depends):
            part = f"{PRELUDE}.part"  # a build that is interrupted leaves no half of a header
            self.compiler.spawn([*command, "-o", part])
            (ROOT / part).replace(compiled)
        super().build_extensions()


def native_parts() -> dict[str, object]:
    """Nothing where the Makefile, which builds them in place, installs the tree: pip would compile them once more."""
    if os.environ.get("PAGECORE_PREBUILT") == "1":
        return {}
    extensions = cythonize(
        # Of the shared module, which is C, cythonize wants the name and no language.
        [
            Extension(SHARED, [f"{SHARED.replace('.', '/')}.c"], extra_compile_args=["-O1", "-g0", "-w"]),
            *(extension(pyx) for pyx in sources("pagecore/**/_*.pyx")),
        ],
        build_dir="build/cython",
        language_level=3,
        compiler_directives={"embedsignature": True, "binding": True},
        nthreads=os.cpu_count() or 1,
        shared_utility_qualified_name=SHARED,
    )
    return {"libraries": folder_libraries(), "ext_modules": extensions}


if __name__ == "__main__":
    setup(
        package_dir={"pagecore": "pagecore", "pagecore.cuda_src": "cuda_src"},
        packages=[
            *(
                path.parent.relative_to(ROOT).as_posix().replace("/", ".")
                for path in ROOT.glob("pagecore/**/__init__.py")
            ),
            "pagecore.cuda_src",
        ],
        cmdclass={"build_clib": BuildLibraries, "build_ext": BuildExtensions},
        **native_parts(),
    )
