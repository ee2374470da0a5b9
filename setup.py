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
# Generated C++ is not ours to warn about. It calls the libraries, which hold the loops: -O3 compiles it for longer, and
# a step takes as long.
GENERATED = ["-O2", "-Wno-unused-function", "-Wno-unused-parameter", "-Wno-missing-field-initializers"]
# Headers that nearly all generated files include, compiled once for all of them: an eighth of the time of each.
PRELUDE = "build/prelude.hpp"
PRELUDE_TEXT = "#define PY_SSIZE_T_CLEAN\n" + "".join(
    f"#include <{name}>\n"
    for name in (
        *("Python.h", "frameobject.h", "pythread.h", "structmember.h"),
        *("algorithm", "atomic", "cmath", "cstdint", "cstdio", "cstdlib", "cstring", "ios", "memory", "mutex", "new"),
        *("span", "stdexcept", "string", "type_traits", "typeinfo", "utility", "vector"),
    )
)

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
        header = ROOT / PRELUDE
        header.parent.mkdir(exist_ok=True)
        if not header.exists() or header.read_text() != PRELUDE_TEXT:
            header.write_text(PRELUDE_TEXT)
        # The flags of an extension; a compiler that cannot use the result includes the header as it is.
        flags = [*CXX, *GENERATED, "-x", "c++-header", PRELUDE, "-o", f"{PRELUDE}.gch"]
        includes = [f"-I{folder}" for folder in (*INCLUDE, *self.compiler.include_dirs)]
        self.compiler.spawn([*self.compiler.compiler_so_cxx, *includes, *flags])
        super().build_extensions()


def native_parts() -> dict[str, object]:
    """Nothing where the Makefile, which builds them in place, installs the tree: pip would compile them once more."""
    if os.environ.get("PAGECORE_PREBUILT") == "1":
        return {}
    extensions = cythonize(
        [extension(pyx) for pyx in sources("pagecore/**/_*.pyx")],
        build_dir="build/cython",
        language_level=3,
        compiler_directives={"embedsignature": True, "binding": True},
        nthreads=os.cpu_count() or 1,
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
