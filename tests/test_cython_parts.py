"""Files that a Cython module includes share its names: none defines a name twice, or imports two things by one name."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
IMPORT = re.compile(r"^from (\S+) c?import (\([^)]*\)|[^\n]*)", re.MULTILINE)
DEFINITION = re.compile(
    r"^(?:c?p?def )?(?:inline )?(?:class|struct|enum) (\w+)"
    r"|^(?:c?p?def|ctypedef) [^\n(=]*?(\w+)(?=\(| *=|$)"
    r"|^(\w+(?:, *\w+)*) *(?::[^=\n]+)?= *[^=\n]",
    re.MULTILINE,
)


def parts_of(path):
    return [path.with_name(name) for name in re.findall(r'^include "(.+)"$', path.read_text(), re.MULTILINE)]


def names_of(text):
    """Return the names that a part adds to its module: those that it imports, with their sources, and its own."""
    code = re.sub(r'"""[\s\S]*?"""|#[^\n]*', "", text)
    found = []
    for module, names in IMPORT.findall(code):
        for name in filter(None, (each.strip() for each in names.strip("()").replace("\n", " ").split(","))):
            given, _, known = name.partition(" as ")
            found.append((known or given, f"{given} of {module}"))
    own = [next(filter(None, groups)) for groups in DEFINITION.findall(code)]
    return found, [name for names in own for name in re.split(", *", names)]


def clashes(parts):
    """Return the names that more than one part adds to the module, unless all import the same thing."""
    sources, wrong = {}, set()
    for part in parts:
        imported, own = names_of(part)
        for name, source in [*imported, *((name, object()) for name in own)]:
            if sources.setdefault(name, source) != source:
                wrong.add(name)
    return wrong


MODULES = [path for path in sorted((ROOT / "pagecore").rglob("_*.pyx")) if parts_of(path)]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_parts_of_a_module_have_no_name_in_common(path):
    assert clashes([part.read_text() for part in (path, *parts_of(path))]) == set()


def test_every_part_belongs_to_one_module():
    used = [part for path in MODULES for part in parts_of(path)]
    assert sorted(used) == sorted((ROOT / "pagecore").rglob("*.pxi"))


@pytest.mark.parametrize(
    ("one", "other", "clash"),
    [
        ("def f(x):\n    return x\n", "cdef int f(int x) except -1:\n    return x\n", {"f"}),
        ("cdef class A:\n    pass\n", "from pagecore.b cimport A\n", {"A"}),
        ("from pagecore.a cimport write as run\n", "from pagecore.b cimport (\n    write as run,\n)\n", {"run"}),
        ("cdef dict names = {}\n", "names = 3\n", {"names"}),
        ("A, B = 1, 2\n", "B: int = 3\n", {"B"}),
        ("from pagecore.a cimport A\nX = 1\n", "from pagecore.a import A\nY = A\n", set()),
        ('"""def f(x) and x = 1"""\ndef g(x=1):\n    y = x\n', "def h(x=1):\n    y = x\n", set()),
    ],
)
def test_clashes_are_found(one, other, clash):
    assert clashes([one, other]) == clash
