"""Calls that share threads, for the tests and for the programs that they start: pytest is not imported here."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pagecore
from tests.ops.cases import Case, Shape, make_case

C_LIBRARY_SIGNALS = 0b11 << 31  # 32 and 33, which glibc reserves
# Long enough for eight threads: decode, and prompts with decode.
DECODE = Shape(seq_lens=(3000, 17, 1500, 0, 900, 2100), heads=(8, 4))
MIXED = Shape(seq_lens=(1500, 300, 1, 2100, 700), query_lens=(1, 300, 1, 5, 90), heads=(8, 4))
HEADS = {"num_query_heads": 8, "num_kv_heads": 2}
WRONG = ["0", "-2", "two", "1.5", "1025", "9" * 5000, "2 ", "\u0663", "1_0"]  # values of PAGECORE_NUM_THREADS


@functools.cache
def decode_case() -> Case:
    return make_case(DECODE)


def attend(num_threads: int | None = None) -> Any:
    """Return the result of one multi-threaded call."""
    if num_threads is not None:
        pagecore.set_num_threads(num_threads)
    return decode_case().run()


def signal_bits(signals: Iterable[int]) -> int:
    return sum(1 << (number - 1) for number in signals)


def own_threads() -> dict[str, int]:
    """Return the threads of the kernels in this process by name, with the signals that each blocks.

    A thread blocks every signal, the C library's own two as well, until the system first runs it: wait for that.
    """
    valid = signal_bits(signal.valid_signals())
    while True:
        tasks = [(task / "status").read_text() for task in Path("/proc/self/task").iterdir()]
        fields = [dict(line.split(":\t") for line in text.splitlines()) for text in tasks]
        found = {each["Name"]: int(each["SigBlk"], 16) for each in fields if each["Name"].startswith("pagecore-")}
        if not any(blocked & C_LIBRARY_SIGNALS for blocked in found.values()):
            return {name: blocked & valid for name, blocked in sorted(found.items())}
        os.sched_yield()
