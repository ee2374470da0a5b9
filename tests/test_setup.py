"""The build: compiled headers are not stale, source distributions are complete, and goals of make run in order."""

import gc
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("Cython", reason="needs cython: it is not installed")

from setuptools import Distribution  # isort: skip  # after Cython, which skips

ROOT = Path(__file__).parent.parent
HEADERS = ["pagecore/native/a.hpp", "pagecore/index/radix/b.hpp", "cuda_src/abi/c.h", "third_party/d.h"]
# Writes the flags before -o into the file named after it, and fails if one of them is --fail.
COMPILER = """
while [ "$1" != -o ]; do flags="$flags $1"; shift; done
echo $flags > "$2"
case $flags in *--fail*) exit 1; esac
"""


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """setup.py as a module, for a tree of a few headers."""
    spec = importlib.util.spec_from_file_location("pagecore_setup", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    for header in HEADERS:
        (tmp_path / header).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / header).write_text("")
    return module


def compiles(setup, *flags):
    """Compile a prelude; return True if the compiler ran."""
    made = setup.ROOT / f"{setup.prelude('index')}.gch"
    before = made.stat().st_ino if made.exists() else None
    compiler = SimpleNamespace(compiler_so_cxx=["sh", "-c", COMPILER, "sh"], include_dirs=["include"])
    setup.compile_prelude("index", compiler, ["-O1", *flags])
    return made.stat().st_ino != before


@pytest.mark.parametrize("header", HEADERS)
def test_a_prelude_is_compiled_again_after_a_change_of_any_header(setup, header):
    assert [compiles(setup) for _ in range(2)] == [True, False]
    later = (setup.ROOT / f"{setup.prelude('index')}.gch").stat().st_mtime + 10
    os.utime(setup.ROOT / header, (later, later))
    assert compiles(setup)


def test_a_prelude_is_compiled_again_with_other_flags(setup):
    assert compiles(setup)
    assert compiles(setup, "-g")
    assert "-g" in (setup.ROOT / f"{setup.prelude('index')}.gch").read_text()
    assert not compiles(setup, "-g")


def test_every_header_that_a_declaration_needs_is_installed(setup, monkeypatch):
    monkeypatch.setattr(setup, "ROOT", ROOT)
    packages = {path.parent.relative_to(ROOT) for path in (ROOT / "pagecore").rglob("__init__.py")}
    packages |= {Path(*name.split(".")) for name in setup.data_packages()}
    needed, seen = set((ROOT / "pagecore").rglob("*.pxd")), set()
    while needed:
        seen |= needed
        named = {name for path in needed for name in re.findall(r'"(pagecore/[\w/]+\.hpp)"', path.read_text())}
        needed = {ROOT / name for name in named} - seen
    assert {
        path.relative_to(ROOT).as_posix() for path in seen if path.parent.relative_to(ROOT) not in packages
    } == set()
    assert Path("pagecore/index/radix/nodes/node_store.hpp") in {path.relative_to(ROOT) for path in seen}


def test_extensions_of_sources_that_are_gone_are_removed(setup):
    folder = setup.ROOT / "pagecore" / "index" / "radix"
    for name in ("_kept.pyx", "_kept.abi.so", "_gone.abi.so", "_kept.other.so"):
        (folder / name).touch()
    shared = setup.ROOT / "pagecore" / "_cython.abi.so"
    shared.touch()
    setup.remove_extensions_without_source(".abi.so")
    assert sorted(path.name for path in folder.glob("_*")) == ["_kept.abi.so", "_kept.other.so", "_kept.pyx"]
    assert shared.exists()


def test_a_build_in_place_removes_extensions_of_sources_that_are_gone(setup):
    gone = setup.ROOT / "pagecore" / "index" / f"_gone{EXTENSION_SUFFIXES[0]}"
    gone.touch()
    command = setup.BuildExtensions(Distribution({"ext_modules": []}))
    command.ensure_finalized()
    command.run()
    assert gone.exists()
    command.inplace = True
    command.run()
    assert not gone.exists()


def test_every_source_is_in_one_unit(setup):
    files = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "pagecore").rglob("*.cpp"))
    units = setup.units(files)
    assert sorted(file for parts in units.values() for file in parts) == files
    joined = {unit: parts for unit, parts in units.items() if parts != [unit]}
    assert len(joined) == len(setup.JOINED)
    assert all(len(parts) > 1 and not Path(unit).is_relative_to("pagecore") for unit, parts in joined.items())


def test_a_unit_is_written_again_with_other_sources(setup):
    unit = "build/a.cpp"
    setup.write_joined(unit, ["x.cpp", "y.cpp"])
    os.utime(setup.ROOT / unit, (1, 1))
    setup.write_joined(unit, ["x.cpp", "y.cpp"])
    assert (setup.ROOT / unit).stat().st_mtime == 1
    setup.write_joined(unit, ["x.cpp"])
    assert (setup.ROOT / unit).stat().st_mtime > 1
    assert (setup.ROOT / unit).read_text() == '#include "x.cpp"\n'


def is_forced(setup, monkeypatch):
    """Generate no extensions; return True if Cython was asked for all files again."""
    forced = []
    monkeypatch.setattr(setup, "cythonize", lambda _, force, **options: forced.append(force) or [])
    setup.generate([])
    return bool(forced[0])


def test_everything_is_generated_again_with_other_options_of_cython(setup, monkeypatch):
    assert [is_forced(setup, monkeypatch) for _ in range(2)] == [True, False]
    monkeypatch.setitem(setup.CYTHON_OPTIONS, "compiler_directives", {"auto_pickle": True})
    assert [is_forced(setup, monkeypatch) for _ in range(2)] == [True, False]
    monkeypatch.setattr(setup.Cython, "__version__", "3.2.99")
    assert [is_forced(setup, monkeypatch) for _ in range(2)] == [True, False]


def test_files_that_could_not_be_generated_are_generated_again(setup, monkeypatch):
    def fail(_, **options):
        raise OSError("no space left")

    assert is_forced(setup, monkeypatch)
    monkeypatch.setitem(setup.CYTHON_OPTIONS, "language_level", 2)
    monkeypatch.setattr(setup, "cythonize", fail)
    with pytest.raises(OSError, match="no space left"):
        setup.generate([])
    assert gc.isenabled()
    assert is_forced(setup, monkeypatch)


def test_files_of_options_with_which_generation_failed_are_generated_again(setup, monkeypatch):
    """The files that were generated before the error are those of other options than the first."""

    def fail(_, **options):
        raise OSError("no space left")

    assert is_forced(setup, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setitem(setup.CYTHON_OPTIONS, "language_level", 2)
        patch.setattr(setup, "cythonize", fail)
        with pytest.raises(OSError, match="no space left"):
            setup.generate([])
    assert [is_forced(setup, monkeypatch) for _ in range(2)] == [True, False]


@pytest.mark.parametrize("version", ["3.1.9", "3.3.0a1", "3.3.1", "3.10.0", "4.0"])
def test_a_version_of_cython_that_is_excluded_is_refused(setup, monkeypatch, version):
    monkeypatch.delenv("PAGECORE_PREBUILT", raising=False)
    monkeypatch.setattr(setup.Cython, "__version__", version)
    with pytest.raises(SystemExit, match=rf"Cython {re.escape(version)} .* 3\.2 .* below 3\.3.*pip install 'cython>="):
        setup.native_parts()
    assert not (setup.ROOT / "build").exists()


@pytest.mark.parametrize("version", ["3.2.0", "3.2.12", "3.2.0rc1"])
def test_other_versions_of_cython_are_used(setup, version):
    setup.check_cython(version)


def test_the_versions_of_cython_are_those_of_the_package_metadata(setup):
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert f"cython>={setup.CYTHON_LEAST},<{setup.CYTHON_BELOW}" in required


def cpuinfo(setup, isas, vendor):
    features = setup.X86_FEATURES | {"vnni": setup.VNNI_FEATURES}
    flags = " ".join(flag for isa in isas for flag in sorted(features[isa]))
    return f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu {flags} ht\nbugs\t: none\n"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs the levels of x86-64")
@pytest.mark.parametrize(
    ("isas", "expected"),
    [
        (["v2"], ["v2"]),
        (["v2", "v3"], ["v3"]),
        (["v2", "v3", "v4"], ["v4"]),
        (["v2", "v3", "v4", "vnni"], ["v4", "v4_bf16"]),
        (["v2", "v3", "v4_bf16"], ["v3"]),
        (["v2", "v3", "v4", "v4_bf16"], ["v4_bf16"]),
        (["v2", "v3", "v4", "v4_bf16", "v4_amx"], ["v4_bf16", "v4_amx"]),
    ],
)
def test_a_native_build_has_the_instruction_set_that_the_processor_chooses(setup, isas, expected):
    assert setup.native_isas(cpuinfo(setup, isas, "AuthenticAMD")) == expected
    of_intel = ["v4", "v4_bf16"] if expected == ["v4_bf16"] else expected
    assert setup.native_isas(cpuinfo(setup, isas, "GenuineIntel")) == of_intel
    assert setup.native_isas("") == list(setup.X86_LEVELS)


def test_a_native_build_for_aarch64_has_neon(setup, monkeypatch):
    monkeypatch.setattr(setup, "ISA_FLAGS", {"neon": ["-march=armv8-a"]})
    assert setup.native_isas("processor\t: 0\nFeatures\t: fp asimd\nflags\t: sse4_2 popcnt\n") == ["neon"]


def test_an_unknown_choice_of_instruction_sets_is_refused(setup, monkeypatch):
    monkeypatch.setenv("PAGECORE_BUILD_ISA", "v3")
    with pytest.raises(SystemExit, match='PAGECORE_BUILD_ISA to be one of "all", "native", "local", got "v3"'):
        setup.built_isas()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs the levels of x86-64")
@pytest.mark.parametrize(
    ("isas", "optimised"),
    [
        (["v2", "v3"], ["v2", "v3"]),
        (["v2", "v3", "v4"], ["v2", "v3", "v4"]),
        (["v2", "v3", "v4", "vnni"], ["v2", "v3", "v4", "v4_bf16"]),
        (["v2", "v3", "v4", "v4_bf16", "v4_amx"], ["v2", "v3", "v4", "v4_bf16", "v4_amx"]),
    ],
)
def test_a_local_build_optimises_what_the_processor_can_run(setup, monkeypatch, isas, optimised):
    monkeypatch.setattr(setup.Path, "read_text", lambda _: cpuinfo(setup, isas, "AuthenticAMD"))
    monkeypatch.setenv("PAGECORE_BUILD_ISA", "local")
    built = setup.built_isas()
    assert list(built) == list(setup.ISA_FLAGS)
    assert [isa for isa, flags in built.items() if flags == setup.ISA_FLAGS[isa]] == optimised
    assert all("-Og" in flags for isa, flags in built.items() if isa not in optimised)
    monkeypatch.setenv("PAGECORE_BUILD_ISA", "all")
    assert setup.built_isas() == setup.ISA_FLAGS


def test_an_extension_is_linked_again_if_its_kernels_get_other_flags(setup):
    isa, flags = next(iter(setup.ISA_FLAGS.items()))
    setup.write_absent({isa: [*flags, "-Og"]})
    written = (setup.ROOT / setup.ABSENT).read_text()
    setup.write_absent({isa: flags})
    assert (setup.ROOT / setup.ABSENT).read_text() != written


def test_objects_without_optimisation_are_apart(setup):
    command = setup.BuildLibraries(Distribution())
    command.build_temp = "build/temp"
    command.compiler = SimpleNamespace(
        object_filenames=lambda units, output_dir: [f"{output_dir}/{units[0]}.o"], compile=lambda *_, **__: None
    )

    def made(*flags):
        info = {"cflags": ["-O3", *flags], "include_dirs": [], "depends": ["a.cpp"]}
        return Path(command.compile_one(("a.cpp", ["a.cpp"], info), None)[1])

    (setup.ROOT / "a.cpp").touch()
    assert made() == made("-g") == Path("build/temp/a.cpp.o")
    assert made("-Og") == Path("build/temp/unoptimised/a.cpp.o")


def test_instruction_sets_that_a_build_leaves_out_have_empty_tables(setup):
    first, *others = setup.ISA_FLAGS
    setup.write_absent({first: setup.ISA_FLAGS[first]})
    text = (setup.ROOT / setup.ABSENT).read_text()
    assert [f"{isa}::kTable{{}}" in text for isa in setup.ISA_FLAGS] == [False] + [True] * len(others)
    assert ("v4_bf16::kTableWithoutPairs{}" in text) == ("v4_bf16" in others)


def test_a_prelude_that_fails_to_compile_is_not_used(setup):
    with pytest.raises(subprocess.CalledProcessError):
        compiles(setup, "--fail")
    assert not (setup.ROOT / f"{setup.prelude('index')}.gch").exists()
    assert compiles(setup)


def test_a_prelude_that_two_builds_compile_at_the_same_time_is_whole(setup, monkeypatch):
    made = setup.ROOT / f"{setup.prelude('index')}.gch"
    run = subprocess.run

    def compile_slowly(command, **_):
        with (setup.ROOT / command[-1]).open("w", buffering=1) as output:
            output.write("half, ")
            monkeypatch.setattr(setup.subprocess, "run", run)
            monkeypatch.setattr(setup.os, "getpid", lambda: 0)
            assert compiles(setup)  # by another process
            output.write("whole")
            assert "whole" not in made.read_text()

    monkeypatch.setattr(setup.subprocess, "run", compile_slowly)
    assert compiles(setup)
    assert made.read_text() == "half, whole"


def test_goals_of_make_run_one_after_another(tmp_path):
    (tmp_path / "Makefile").write_text(f"include {ROOT}/Makefile\nfirst last: ; @echo $@; sleep 0.2; echo $@\n")
    command = ["make", "--silent", "--no-print-directory", "JOBS=2", "first", "last"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}  # of make test
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["first", "first", "last", "last"]


@pytest.mark.slow
def test_a_source_distribution_has_every_source(tmp_path):
    tree = tmp_path / "tree"
    for folder in ("pagecore", "cuda_src", "third_party"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("*.so", "*.md", "__pycache__"))
    sources = {path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file()}
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    environment = os.environ | {"PAGECORE_PREBUILT": "1"}  # lists no native parts
    command = [sys.executable, "setup.py", "-q", "sdist", "--dist-dir", tmp_path]
    subprocess.run(command, cwd=tree, env=environment, capture_output=True, check=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert sources <= names
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE"} <= names
