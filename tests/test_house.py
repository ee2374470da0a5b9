"""The house: imports run one way and in no circles, importing pagecore imports no framework, and prose is plain."""

import ast
import functools
import re
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from tests.prose import faults

ROOT = Path(__file__).parent.parent
ROOMS = {
    "errors": set(),
    "lazy": set(),
    "native": set(),
    "arrays": {"errors", "native"},
    "index": {"errors", "native"},
    "ops": {"arrays", "errors", "native"},
    "storage": {"ops", "arrays", "errors"},
    "models": {"storage", "arrays", "errors"},
    "cache": {"index", "storage", "ops", "arrays", "errors", "native"},
    "tiers": {"cache", "index", "storage", "ops", "arrays", "errors", "native", "lazy"},
    "serving": {"tiers", "cache", "models", "storage", "ops", "arrays", "index", "errors", "native", "lazy"},
    "cli": {"serving", "errors"},
    "__main__": {"cli"},  # python -m pagecore
    "interop": {"cache", "models", "storage", "ops", "index", "arrays", "errors", "native"},
}
# Headers that call the interpreter; no other C++ includes Python.h.
GLUE = {"translate.hpp", "numpy_array.hpp", "exchange.hpp"}
OPTIONAL = {
    *("cupy", "torch", "jax", "transformers", "rich", "matplotlib"),
    *("msgspec", "obstore", "zmq", "mooncake", "nixl", "zstandard", "prometheus_client"),
}


def room_of(path):
    return path.relative_to(ROOT / "pagecore").parts[0].removesuffix(".py")


@functools.cache
def import_statements(path):
    """Return the modules that a file of Python names, each with the names that it imports from it."""
    named = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named += [(alias.name, []) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            named.append((node.module, [alias.name for alias in node.names]))
    return named


def imported_modules(path):
    if path.suffix != ".py":
        lines = path.read_text().splitlines()
        found = [re.match(r"\s*(?:from\s+([\w.]+)\s+c?import|c?import\s+([\w.]+))", line) for line in lines]
        return {match[1] or match[2] for match in found if match}
    named = import_statements(path)
    return {module for module, _ in named} | {
        f"{module}.{name}" for module, names in named for name in names if module == "pagecore"
    }


SUFFIXES = {".py", ".pyx", ".pxd", ".pxi"}
SOURCES = sorted(path for path in (ROOT / "pagecore").rglob("*.p*") if path.suffix in SUFFIXES and path.stat().st_size)


def parts_of(path):
    """Return the files that a module includes."""
    return [path.with_name(name) for name in re.findall(r'^include "(.+)"$', path.read_text(), re.MULTILINE)]


MODULE_OF = {part: path for path in SOURCES if path.suffix == ".pyx" for part in parts_of(path)}


@pytest.mark.parametrize("room", sorted({room_of(path) for path in SOURCES} - {"__init__"}))
def test_imports_run_one_way(room):
    for path in SOURCES:
        if room_of(path) == room:
            used = {m.split(".")[1] for m in imported_modules(path) if m.startswith("pagecore.")} - {room}
            assert used <= ROOMS[room], f"{path.relative_to(ROOT)} may not import {sorted(used - ROOMS[room])}"


@functools.cache
def name_of(path):
    """Return the module that a file declares, defines or is a part of; a package has the name of its folder."""
    parts = MODULE_OF.get(path, path).relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path) for path in SOURCES} | {name_of(path) for path in (ROOT / "pagecore").rglob("__init__.py")}


@functools.cache
def explicit_imports(path):
    """Return the modules of pagecore that a file imports: lazily, by cimport and for type checking, too."""
    if path.suffix == ".py":
        named = import_statements(path)
    else:
        text = path.read_text()
        flat = re.sub(r"\(([^()]*)\)", lambda m: m[1].replace("\n", " "), text)
        found = re.findall(r"^\s*from\s+(pagecore[\w.]*)\s+c?import\s+([^\n#]+)", flat, re.MULTILINE)
        named = [(module, re.findall(r"(\w+)(?:\s+as\s+\w+)?\s*(?:,|$)", names)) for module, names in found]
        named += [(module, []) for module in re.findall(r"^\s*c?import\s+(pagecore[\w.]*)", flat, re.MULTILINE)]
    used = set()
    for module, names in named:
        below = {f"{module}.{name}" for name in names}
        used |= below & MODULES
        if not names or below - MODULES:
            used.add(module)
    return (used & MODULES) - {name_of(path)}


def circles(graph):
    """Return the strongly connected components of more than one module (Tarjan, 1972)."""
    index, low, stack, found = {}, {}, [], []

    def visit(module):
        index[module] = low[module] = len(index)
        stack.append(module)
        for used in sorted(graph[module]):
            if used not in index:
                visit(used)
                low[module] = min(low[module], low[used])
            elif used in stack:
                low[module] = min(low[module], index[used])
        if low[module] == index[module]:
            component = stack[stack.index(module) :]
            del stack[stack.index(module) :]
            if len(component) > 1:
                found.append(sorted(component))

    for module in sorted(graph):
        if module not in index:
            visit(module)
    return found


@pytest.mark.slow
def test_imports_form_no_circles():
    assert {path.suffix for path in SOURCES} == SUFFIXES
    graph = {module: set() for module in MODULES}
    for path in SOURCES:
        graph[name_of(path)] |= explicit_imports(path)
    assert circles(graph) == []


def folder_of(module):
    """Return the folder of a module; the module itself where folders lie next to it."""
    folder = module if (ROOT / module.replace(".", "/")).is_dir() else module.rpartition(".")[0]
    nested = any((ROOT / folder.replace(".", "/")).glob("*/__init__.py"))
    return module if nested else folder


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_folders_form_no_circles(room):
    modules = {module for module in MODULES if module.startswith(f"pagecore.{room}.")}
    graph = {folder_of(module): set() for module in modules}
    for path in SOURCES:
        if name_of(path) in modules:
            folder = folder_of(name_of(path))
            graph[folder] |= {folder_of(used) for used in explicit_imports(path) & modules} - {folder}
    assert circles(graph) == []


def test_circles_are_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == [["b", "c"]]


NATIVE = sorted((ROOT / "pagecore").rglob("*.[hc]pp"))


@pytest.mark.parametrize("room", sorted({room_of(path) for path in NATIVE}))
def test_native_code_knows_its_own_room_and_no_python(room):
    allowed = {f"pagecore/{room}", "pagecore/native"}
    if room == "ops":  # the one list of dtypes
        allowed.add("pagecore/arrays/dtypes/dtype.hpp")
    if room == "interop":  # native code of other frameworks, which has no interpreter to call the operations through
        allowed.add("pagecore/ops/cpu/host_calls.hpp")
    foreign = []
    for path in NATIVE:
        includes = re.findall(r'#include\s+[<"]([^>"]+)[>"]', path.read_text()) if room_of(path) == room else []
        for include in includes:
            is_native = include.startswith("pagecore/")
            is_foreign = is_native and not any(f"{include}/".startswith(folder + "/") for folder in allowed)
            if is_foreign or ("Python.h" in include and path.name not in GLUE):
                foreign.append(f"{path.relative_to(ROOT)} includes {include}")
    assert foreign == []


def test_containers_are_declared_with_few_members():
    wide = re.compile(r"from libcpp\.(vector|span|memory) ")  # instead of pagecore.native.std
    sources = (ROOT / "pagecore").rglob("*.p[yx][xd]")
    assert [path.name for path in sources if wide.search(path.read_text())] == []


# The folders of kernels, and the folders that each includes. Every folder includes itself and abi.
KERNELS = {
    "abi": set(),
    "shapes": set(),
    "device": set(),
    "attention": {"shapes", "device"},
    "latent": {"shapes", "device", "attention"},
    "sparse": {"device"},
    "moves": {"device"},
    "codecs": {"device", "latent"},
    "tables": {"device"},
}
KERNEL_FILES = sorted(path for path in (ROOT / "cuda_src").rglob("*") if path.suffix in {".cu", ".cuh", ".h"})


def included_kernels(path):
    """Return the files of cuda_src that one of them includes, by their paths in it."""
    return re.findall(r'^#include "cuda_src/([^"]+)"', path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("folder", KERNELS)
def test_includes_of_kernels_run_one_way(folder):
    found = [path for path in KERNEL_FILES if path.relative_to(ROOT / "cuda_src").parts[0] == folder]
    assert found
    for path in found:
        includes = included_kernels(path)
        used = {include.partition("/")[0] for include in includes} - {folder, "abi"}
        assert used <= KERNELS[folder], f"{path.relative_to(ROOT)} may not include {sorted(used - KERNELS[folder])}"
        # The host includes headers alone.
        assert path.suffix != ".h" or all(include.endswith(".h") for include in includes), path
        named = re.findall(r'^#include ["<]([^">]+)', path.read_text(), re.MULTILINE)
        others = {each for each in named if not each.startswith("cuda_src/")} - {"emulated_primitives.hpp"}
        assert not others, f"{path.relative_to(ROOT)} includes {sorted(others)}"


def test_files_and_folders_of_kernels_form_no_circles():
    files, folders = {}, {}
    for path in KERNEL_FILES:
        name = path.relative_to(ROOT / "cuda_src")
        assert name.parts[0] in KERNELS, f"{name} is in none of the folders {sorted(KERNELS)}"
        files[name.as_posix()] = includes = included_kernels(path)
        used = {str(Path(include).parent) for include in includes} - {str(name.parent)}
        folders.setdefault(str(name.parent), set()).update(used)
    assert circles(files) == circles(folders) == []


# The folders of benches, and the folders that each imports. The modules next to them may import all.
BENCHES = {
    "harness": set(),
    "index": {"harness"},
    "peers": {"harness", "index"},
    "host": {"harness", "peers"},
    "gpu": {"harness", "host"},
    "tiers": {"harness", "saving"},
    "serving": {"harness", "index", "peers"},
    "soaking": set(),
}


@pytest.mark.parametrize("folder", BENCHES)
def test_imports_of_benches_run_one_way(folder):
    found = sorted((ROOT / "bench" / folder).glob("*.py"))
    assert found
    for path in found:
        used = {m.split(".")[1] for m in imported_modules(path) if m.startswith("bench.")} - {folder}
        assert used <= BENCHES[folder], f"{path.relative_to(ROOT)} may not import {sorted(used - BENCHES[folder])}"


BACKENDS = sorted(
    path
    for backend in ("cpu", "cuda")
    for path in (ROOT / "pagecore/ops" / backend).rglob("*")
    if path.suffix in SUFFIXES | {".pyi", ".hpp", ".cpp"}
)


@pytest.mark.parametrize(("backend", "other"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_backends_do_not_know_each_other(backend, other):
    """The host's kernels and CUDA's share pagecore/ops alone."""
    found = [path for path in BACKENDS if path.is_relative_to(ROOT / "pagecore/ops" / backend)]
    assert found
    named = re.compile(rf"pagecore[./]ops[./]{other}\b|from pagecore\.ops c?import .*\b{other}\b")
    assert [str(path.relative_to(ROOT)) for path in found if named.search(path.read_text())] == []


def test_cimports_name_the_declaring_module_so_that_its_changes_rebuild_the_importer():
    # Cython does not track a module that is cimported as a name from its package; cimport from the module itself.
    from_packages = []
    for path in SOURCES:
        if path.suffix != ".py":
            modules = re.findall(r"^from\s+(pagecore[\w.]*)\s+cimport", path.read_text(), re.MULTILINE)
            declared = {module: ROOT / (module.replace(".", "/") + ".pxd") for module in modules}
            from_packages += [f"{path}: {module}" for module, file in declared.items() if not file.is_file()]
    assert from_packages == []


def test_setup_knows_the_rooms_whose_headers_an_extension_is_compiled_from():
    (below,) = re.findall(r"^BELOW = (\{.*?^\})", (ROOT / "setup.py").read_text(), re.MULTILINE | re.DOTALL)
    rooms = {"native": ()} | ast.literal_eval(below)
    reached = {room: {room, "native", *others} for room, others in rooms.items()}
    for path in SOURCES:
        if path.suffix != ".py":
            for used in re.findall(r"^from pagecore\.(\w+)\S* cimport", path.read_text(), re.MULTILINE):
                assert reached[used] <= reached[room_of(path)], path


# A message from one source of each library; every extension that links the library contains it.
MESSAGES = {
    b"it is the null block, which has no references": "pagecore.index.pools._block_pool",
    b" was freed by another holder of the pool": "pagecore.index.tables._tables",
    b" cannot be freed: it neither starts block ": "pagecore.index.slots._slots",
    b" does not fit a table of int32": "pagecore.index.slots._slots",
    b" is not in use in the state table; use a row": "pagecore.index.states._states",
    b" is in the tree already, at another place": "pagecore.index.radix._radix",
    b" is not available on this machine or in this build; available: ": "pagecore.ops.cpu._cpu",
    b"; number the batches": "pagecore.tiers.disk._io",
}


@pytest.mark.parametrize(("message", "owner"), MESSAGES.items(), ids=MESSAGES.values())
def test_a_room_s_library_is_linked_into_its_own_extension_alone(message, owner):
    """An extension that linked it, too, would have a copy with separate state and would miss later changes."""
    suffix = EXTENSION_SUFFIXES[0]
    built = [path for path in (ROOT / "pagecore").rglob(f"*{suffix}") if message in path.read_bytes()]
    names = [path.relative_to(ROOT).as_posix().removesuffix(suffix).replace("/", ".") for path in built]
    assert names == [owner]


@pytest.mark.slow
def test_importing_pagecore_imports_no_framework():
    code = "import sys, pagecore; print(*sorted(m for m in sys.modules if '.' not in m))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert OPTIONAL.isdisjoint(ran.stdout.split())


def test_public_names_exist_and_are_documented():
    import pagecore

    for name in pagecore.__all__:
        assert getattr(pagecore, name).__doc__, name


PROSE = [
    ROOT / name
    for name in subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    if re.match(
        r"(pagecore|cuda_src|bench|docs|examples|tests)/|(README|CHANGELOG|CONTRIBUTING|SECURITY)\.md$|setup\.py", name
    )
    and re.search(r"\.(py|pyi|pyx|pxd|pxi|hpp|cpp|h|cu|cuh|md)$", name)
    and name != "tests/prose.py"
]
FOLDERS = {"/".join(path.relative_to(ROOT).parts[:-1][:2]): [] for path in sorted(PROSE)}
for path in PROSE:
    FOLDERS["/".join(path.relative_to(ROOT).parts[:-1][:2])].append(path)


@pytest.mark.parametrize("folder", FOLDERS)
def test_prose_is_plain(folder):
    found = {str(path.relative_to(ROOT)): faults(path) for path in FOLDERS[folder]}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}
