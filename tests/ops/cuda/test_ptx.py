"""PTX of kernels: address spaces and caches of loads and stores, which the emulator does not have."""

from __future__ import annotations

import re

import pytest

from pagecore.ops.cuda.compilation.compiler import UNCONVERTED, flags
from pagecore.ops.cuda.compilation.manifest import instance, instances
from pagecore.ops.cuda.compilation.sources import with_headers
from tests.cuda.matrix import cases

pytestmark = pytest.mark.slow

FEW = ("convert_codes", "decode<pc_bfloat16,64,Plain>", "plan", "write_kv<float,float>")
# The first instance of each entry.
EVERY = tuple({each.entry: each.name for each in reversed(instances())}.values())
ACCESS = re.compile(r"^\s*(?:@!?%\w+ )?((?:ld|st|atom|red)\.[\w.:]+)", re.MULTILINE)
SPACES = ("global", "shared", "param", "const")
# Kernels whose sources no thread writes; every other load sees what other threads have stored.
READ_ONLY = ("write_kv", "index_scores_matrix")


def ptx_of(nvrtc, name):
    chosen = instance(name)
    text, headers = with_headers(chosen.source)
    names = [header.encode() for header in headers]
    program = nvrtc.createProgram(text, chosen.source, [header.encode() for header in headers.values()], names)
    try:
        nvrtc.addNameExpression(program, chosen.expression)
        chosen_flags = (each for each in flags() if not each.startswith("--ptxas"))
        nvrtc.compileProgram(program, ("--gpu-architecture=compute_90a", *chosen_flags))
        ptx = nvrtc.getPTX(program)
        return ptx.decode() if isinstance(ptx, bytes) else ptx
    finally:
        nvrtc.destroyProgram(program)


@pytest.mark.parametrize("name", cases(FEW, EVERY))
def test_accesses_name_their_memory_and_loads_are_coherent(nvrtc, name):
    if UNCONVERTED in flags():
        pytest.skip("needs NVRTC 13.1: accesses are generic with an older one")
    accesses = set(ACCESS.findall(ptx_of(nvrtc, name)))
    assert any(each.startswith("ld.global") for each in accesses)
    assert {each for each in accesses if re.split(r"[.:]", each.removeprefix("ld.volatile"))[1] not in SPACES} == set()
    assert any(".nc" in each for each in accesses) == name.startswith(READ_ONLY)
