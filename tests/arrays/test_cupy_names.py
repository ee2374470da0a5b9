"""Every name of CuPy that pagecore, its benches, tests and fakes use exists in the installed CuPy."""

from __future__ import annotations

import ast
import re
import types
from functools import cache
from pathlib import Path

import pytest

from tests.arrays.fake_cupy import FakeCuda, make_cupy
from tests.capabilities import require

ROOT = Path(__file__).parents[2]
FOLDERS = ("pagecore", "bench", "examples", "tests/arrays", "tests/cuda", "tests/gpu", "tests/ops/cuda")
# Variables and attributes that hold a part of CuPy, by file; a plain "cupy" and "_cupy" are CuPy in every file.
HELD = {
    "pagecore/arrays/cuda/cupy_runtime.py": {"_runtime": "cuda.runtime", "_driver": "cuda.driver"},
    "pagecore/arrays/cuda/cupy_current.py": {"_runtime": "cuda.runtime", "_driver": "cuda.driver"},
    "pagecore/arrays/cuda/cupy_library.py": {"runtime": "cuda.runtime"},
    "pagecore/arrays/cuda/cupy_pinned.py": {"runtime": "cuda.runtime"},
    "pagecore/ops/cuda/compilation/compiler.py": {"cuda": "cuda", "binding": "cuda.nvrtc", "nvrtc()": "cuda.nvrtc"},
    "tests/ops/cuda/test_compiler.py": {"nvrtc": "cuda.nvrtc"},
}
# Of the objects that CuPy returns, the attributes that pagecore reads.
ATTRIBUTES = {
    "cuda.Event": ("ptr",),
    "cuda.Stream": ("ptr", "device_id"),
    "cuda.MemoryPointer": ("ptr", "mem"),
    "cuda.runtime.PointerAttributes": ("device", "type", "devicePointer", "hostPointer"),
}


@pytest.fixture(scope="module")
def cupy():
    return require("cupy")


def held_by(node, held):
    """Return the dotted name below CuPy of an expression, "" for CuPy itself, None for another expression."""
    text = ast.unparse(node)
    if text in ("cupy", "import_cupy()", "sys.modules['cupy']") or text.endswith("._cupy"):
        return ""
    last = text.rpartition(".")[2]
    if last in held and (isinstance(node, (ast.Name, ast.Call)) or last.startswith("_")):
        return held[last]
    if isinstance(node, ast.Attribute):
        before = held_by(node.value, held)
        return None if before is None else f"{before}.{node.attr}".lstrip(".")
    return None


def names_in(text, held):
    """Return all dotted names below CuPy in a Python source."""
    found = (held_by(node, held) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute))
    return {name for name in found if name}


@cache
def uses():
    """Return the dotted names below CuPy, each with the files that use it."""
    found = {}
    sources = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.p*")}
    for path in sorted(path for path in sources if path.suffix in {".py", ".pyx", ".pxi"}):
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        if path.suffix != ".py":  # Cython, which `ast` cannot parse
            names = set(re.findall(r"(?<![\w.`\"])cupy\.([a-z]\w*(?:\.\w+)*)", re.sub(r'"""[^"]*"""', "", text)))
        else:
            names = names_in(text, HELD.get(name, {})) if name in HELD or "cupy" in text else set()
        for each in names:
            found.setdefault(each, []).append(name)
    return found


def missing_from(cupy, name):
    """Return the first part of a dotted name that a module lacks, or None. Attributes of objects are not checked."""
    here, seen = cupy, []
    for part in name.split("."):
        if not isinstance(here, types.ModuleType):
            return None
        seen.append(part)
        if not hasattr(here, part):
            return ".".join(seen)
        here = getattr(here, part)
    return None


@pytest.mark.slow
def test_every_name_that_is_used_exists(cupy):
    absent = {name: files for name, files in uses().items() if missing_from(cupy, name)}
    assert absent == {}


@pytest.mark.slow
def test_names_in_use_are_found():
    found = uses()
    expected = {
        "cuda.runtime.memcpyAsync": "pagecore/arrays/cuda/cupy_runtime.py",
        "cuda.runtime.getDeviceCount": "pagecore/arrays/cuda/cupy_library.py",
        "cuda.driver.launchKernel": "pagecore/arrays/cuda/cupy_runtime.py",
        "cuda.alloc_pinned_memory": "pagecore/arrays/cuda/cupy_runtime.py",
        "cuda.ExternalStream": "pagecore/arrays/cuda/cupy_current.py",
        "cuda.nvrtc.getCUBIN": "pagecore/ops/cuda/compilation/compiler.py",
        "cuda.nvrtc.getVersion": "pagecore/ops/cuda/compilation/compiler.py",
        "cuda.UnownedMemory": "pagecore/arrays/exchange/foreign.py",
        "cuda.Device": "pagecore/arrays/tensors/results.py",
        "cuda.get_current_stream": "pagecore/arrays/tensors/streams.py",
        "cuda.Stream": "tests/cuda/kit.py",
        "empty": "tests/arrays/test_streams.py",
    }
    assert {name: file for name, file in expected.items() if file not in found.get(name, [])} == {}


def test_a_name_that_cupy_lacks_is_found(cupy):
    held = HELD["pagecore/arrays/cuda/cupy_runtime.py"]
    (name,) = names_in("self._runtime.errorMemoryAllocation", held) - {"cuda.runtime"}
    assert missing_from(cupy, name) == "cuda.runtime.errorMemoryAllocation"


def offered(fake, prefix=""):
    """Return the dotted names of a fake's modules and namespaces."""
    for name, value in vars(fake).items():
        if not name.startswith("__"):
            yield prefix + name
            if isinstance(value, types.SimpleNamespace):
                yield from offered(value, f"{prefix}{name}.")


def test_every_name_of_the_fake_exists(cupy):
    names = list(offered(make_cupy(FakeCuda())))
    assert "cuda.runtime.memcpyAsync" in names
    assert [name for name in names if missing_from(cupy, name)] == []


def lacking(cupy, name, attributes):
    """Return the attributes that a class of CuPy neither has nor documents; some are assigned in its constructor."""
    found = cupy
    for part in name.split("."):
        found = getattr(found, part)
    documented = " ".join(base.__doc__ or "" for base in found.__mro__)
    return [
        each
        for each in attributes
        if not hasattr(found, each) and f"~{name.rpartition('.')[2]}.{each} " not in documented
    ]


def test_objects_of_the_fake_have_only_attributes_of_cupy(cupy):
    fake = make_cupy(FakeCuda()).cuda
    with pytest.warns(DeprecationWarning, match="ExternalStream"), fake.ExternalStream(7):
        memory = fake.alloc(8)
    returned = {
        "cuda.Event": fake.Event(),
        "cuda.Stream": fake.get_current_stream(0),
        "cuda.MemoryPointer": memory,
        "cuda.runtime.PointerAttributes": fake.runtime.pointerGetAttributes(1),
    }
    assert {name: lacking(cupy, name, vars(value)) for name, value in returned.items()} == {
        name: [] for name in returned
    }


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_every_attribute_that_is_read_of_an_object_exists(cupy, name):
    assert lacking(cupy, name, ATTRIBUTES[name]) == []
    assert lacking(cupy, name, ["no_such"]) == ["no_such"]


def test_an_error_of_the_runtime_has_a_status(cupy):
    error = cupy.cuda.runtime.CUDARuntimeError(2)
    assert error.status == 2
    assert "cudaErrorMemoryAllocation" in str(error)
