"""Kernels use the instructions of their instruction set, and their objects export no function that others could use.

A function with linkage in an object for a wide instruction set may be the one that the linker keeps for all of them: it
then stops a machine that lacks the instructions.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from pagecore.ops.cpu import _cpu
from tests.capabilities import missing

ROOT = Path(__file__).parent.parent.parent
BUILT = ROOT / "build" / f"temp.{sysconfig.get_platform()}-{sys.implementation.cache_tag}"
# `make test-aarch64` creates it.
CROSS_OBJECT = ROOT / "build/sanitize/aarch64/plain/pagecore/ops/cpu/isa/neon.o"
IS_X86 = sysconfig.get_platform().endswith("x86_64")

VEX = r"^v|^(andn|bextr|mulx|pdep|pext|rorx|sarx|shlx|shrx) "
YMM, ZMM, EVEX = r"%ymm\d", r"%zmm\d", r"%[xyz]mm(1[6-9]|2\d|3[01])\b|%k[0-7]\b"
FMA_YMM, FMA_ZMM = r"^vfmadd\d+ps .*%ymm", r"^vfmadd\d+ps .*%zmm"
BF16 = r"^v\w*bf16"
TILES = r"^(tile|tdp|ldtilecfg|sttilecfg)"
NEON, SVE, ARM_BF16 = r"\bv\d+\.4s\b", r"\bz\d+\.[bhsd]\b", r"^bf(dot|mmla|mlal)"
FMLA = r"^fmla\s+v\d+\.4s"
DOT_BF16, DOT_TILES = r"^vdpbf16ps .*%zmm", r"^tdpbf16ps "
LOAD_TILES, SET_TILES, FREE_TILES = r"^tileloadd", r"^ldtilecfg", r"^tilerelease"


@dataclass(frozen=True)
class Code:
    """Patterns of instructions that the code of a level must and must not contain."""

    has: tuple[str, ...]
    never: tuple[str, ...]


LEVELS = {
    "v2": Code(has=(r"^mulps .*%xmm",), never=(VEX, YMM, ZMM, EVEX, TILES)),
    "v3": Code(has=(YMM, FMA_YMM), never=(ZMM, EVEX, BF16, TILES)),
    "v4": Code(has=(ZMM, FMA_ZMM), never=(BF16, TILES)),
    "v4_bf16": Code(has=(ZMM, FMA_ZMM), never=(TILES,)),
    "v4_amx": Code(has=(ZMM, FMA_ZMM), never=()),
    "neon": Code(has=(NEON, FMLA), never=(SVE, ARM_BF16)),
}
# Instructions that the names of the last two levels promise.
PROMISED = [
    ("v4_bf16", DOT_BF16),
    ("v4_amx", DOT_TILES),
    ("v4_amx", LOAD_TILES),
    ("v4_amx", SET_TILES),
    ("v4_amx", FREE_TILES),
]
# Symbols of the C library, and those of stack protection, which some distributions enable.
MAY_CALL = {"exp", "log", "memcpy", "memmove", "memset", "memcmp", "__stack_chk_fail", "_GLOBAL_OFFSET_TABLE_"}


def run(tool: str, *arguments: object) -> str:
    if shutil.which(tool) is None:
        missing(tool, "it is a part of binutils")
    return subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


def prefix(level: str) -> str:
    """Return the binutils for the objects of a level."""
    return "" if (level == "neon") != IS_X86 else "aarch64-linux-gnu-" if level == "neon" else "x86_64-linux-gnu-"


def built_object(level: str) -> Path | None:
    """Return the object or archive with only the kernels of a level, from the build in place."""
    if level == "neon" and IS_X86:
        return CROSS_OBJECT if CROSS_OBJECT.is_file() else None
    archive = BUILT / f"libpagecore_cpu_{level}.a"
    return archive if archive.is_file() else None


@cache
def instructions(level: str) -> str:
    """Return the instructions of a level's kernels, from its object or from its namespace in the extension."""
    path = built_object(level)
    if path is not None:
        return parsed(run(f"{prefix(level)}objdump", "-d", "--no-show-raw-insn", path))
    if (level == "neon") == IS_X86:
        missing(
            "aarch64" if level == "neon" else "x86-64", f"no {level} kernels are here; make test-aarch64 leaves some"
        )
    listing = run("objdump", "-d", "--no-show-raw-insn", _cpu.__file__)
    own = f"8pagecore3cpu{len(level)}{level}12_GLOBAL__N_1"
    functions = [text for text in re.split(r"\n(?=[0-9a-f]+ <)", listing) if own in text.partition("\n")[0]]
    if not functions:
        missing("symbols", f"{_cpu.__file__} is stripped and {BUILT} has no objects")
    return parsed("\n".join(functions))


def parsed(listing: str) -> str:
    """Return each different instruction once, as a line of its mnemonic, one blank and its operands."""
    return "\n".join(sorted({re.sub(r"\s+", " ", text) for text in set(re.findall(r":\t(.+)", listing))}))


def complaints(code: Code, lines: str) -> list[str]:
    """Return the patterns that a level lacks, and the first forbidden instruction of each kind."""
    found = [f"nothing is like {pattern}" for pattern in code.has if first_like(pattern, lines) is None]
    first = [first_like(pattern, lines) for pattern in code.never]
    return found + [line for line in first if line is not None]


def first_like(pattern: str, lines: str) -> str | None:
    """Return the first line in which a pattern occurs."""
    found = re.search(pattern, lines, re.MULTILINE)
    return found and lines[lines.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0]


def symbols(level: str) -> list[tuple[str, str]]:
    """Return the type and the demangled name of every symbol in a level's object."""
    path = built_object(level)
    if path is None:
        missing("objects", f"{level}'s is not in build: pagecore was not built in place, or not for that machine")
    lines = run(f"{prefix(level)}nm", "-C", path).splitlines()
    matches = [re.fullmatch(r"[0-9a-f ]{16} (\S) (.*)", line) for line in lines]
    return [(match[1], match[2]) for match in matches if match]


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_the_kernels_are_made_of_their_levels_instructions(level):
    assert complaints(LEVELS[level], instructions(level)) == []


@pytest.mark.parametrize(("level", "pattern"), PROMISED)
def test_kernels_use_the_instructions_that_their_level_is_named_after(level, pattern):
    lines = instructions(level)
    if level == "v4_amx" and "x86-64-v4-amx" in _cpu.available_isas() and not machine_has_tiles():
        missing("AMX", "this build keeps tiles in memory")
    assert first_like(pattern, lines)


def machine_has_tiles() -> bool:
    return "amx_tile" in Path("/proc/cpuinfo").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("level", "narrower"), [("v3", "v2"), ("v4", "v2"), ("v4", "v3"), ("v2", "v3"), ("v3", "v4")])
def test_the_code_of_one_level_would_not_pass_for_another(level, narrower):
    assert complaints(LEVELS[narrower], instructions(level))


def tables(level: str) -> list[str]:
    """Return the names of the kernel tables of a level, that of latent attention last."""
    without_pairs = ["kTableWithoutPairs"] if level == "v4_bf16" else []
    return [f"pagecore::cpu::{level}::{name}" for name in ("kTable", *without_pairs, "kLatentKernels")]


@pytest.mark.parametrize("level", LEVELS)
def test_objects_define_their_tables_and_nothing_else_with_linkage(level):
    defined = [(kind, name) for kind, name in symbols(level) if kind != "U" and (kind.isupper() or kind in "uvw")]
    # Latent attention has an object of its own, which an archive includes.
    names = sorted(name for _, name in defined)
    assert names in (sorted(tables(level)), tables(level)[:-1])
    assert {kind for kind, _ in defined} <= set("DR")


@pytest.mark.parametrize("level", LEVELS)
def test_an_object_calls_only_functions_for_every_machine(level):
    assert {name for kind, name in symbols(level) if kind == "U"} <= MAY_CALL | set(tables(level))
