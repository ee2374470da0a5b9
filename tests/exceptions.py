"""Calls in an x86-64 extension module at which a std::bad_alloc would end the process.

Cython puts a try block around a call only if the function is declared `except +`. An exception at any other call finds
no handler, and the process ends. `uncaught` disassembles an extension and looks up each call of a function that may
fail to allocate in the tables of the unwinder: those of the Itanium C++ ABI, as `.eh_frame` and `.gcc_except_table`
store them. Calls through a pointer, and so those of virtual functions, are not seen.
"""

from __future__ import annotations

import bisect
import platform
import re
import shutil
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.capabilities import missing

# `operator new`, a `throw` without operand, and members of std::string of the standard library that allocate.
THROWS = re.compile(r"_Zn[wa]|__cxa_rethrow|_ZSt\d+__throw_bad_|_ZNSt7__cxx1112basic_string")
# Destructors, and the moves, clear() and swap() of a string.
THROWS_NOT = re.compile(
    r"nothrow|D[012]Ev$|_M_disposeEv$|basic_stringIcSt11char_traitsIcESaIcEE(C[12]EOS4_$|aSEOS4_|5clear|4swap)"
)
# Functions that Cython generates; template instances over its types are not.
GENERATED = re.compile(r"_ZL?\d+__[pP]yx|__[pP]yx|PyInit")
FUNCTION_OR_CALL = re.compile(
    r"^[0-9a-f]+ <(\S+)>:|^ +([0-9a-f]+):\t(call|j\w+?)q? +[0-9a-f]+ <([^>+]+)(?:\+0x[0-9a-f]+)?>", re.MULTILINE
)
# Of DWARF's encodings of pointers.
OMITTED, RELATIVE, FORMAT = 0xFF, 0x10, 0x0F
FORMATS = {0: "Q", 2: "H", 3: "I", 4: "Q", 10: "h", 11: "i", 12: "q"}


@dataclass
class Cursor:
    """Reader of a section that is loaded at an address."""

    data: bytes
    address: int
    at: int = 0

    def take(self, kind: str) -> int:
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.at)
        self.at += struct.calcsize(kind)
        return int(value)

    def leb(self, *, signed: bool = False) -> int:
        value = shift = 0
        while True:
            byte = self.take("B")
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value - (1 << shift) if signed and byte & 64 else value

    def pointer(self, encoding: int) -> int:
        """Return an encoded pointer; 0 is null."""
        if encoding == OMITTED:
            return 0
        here, kind = self.address + self.at, encoding & FORMAT
        value = self.leb(signed=kind == 9) if kind in {1, 9} else self.take(FORMATS[kind])
        return value + here if value and encoding & RELATIVE else value

    def moved(self, at: int) -> Cursor:
        return Cursor(self.data, self.address, at)


def sections(path: Path) -> dict[str, Cursor]:
    """Return the sections of an ELF file by name."""
    data = path.read_bytes()
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    text = data[heads[names][4] :]
    return {
        text[head[0] : text.index(b"\0", head[0])].decode(): Cursor(data[head[4] : head[4] + head[5]], head[3])
        for head in heads
    }


def frames(section: Cursor) -> list[tuple[int, int, int]]:
    """Return the beginning and end of each function in `.eh_frame`, and the address of its handlers or 0."""
    shared, found = {}, []
    while section.at < len(section.data) and (size := section.take("I")):
        begin = section.at
        back = section.take("I")
        if back == 0:
            shared[begin - 4] = shared_part(section)
        else:
            of_code, of_handlers, is_augmented = shared[begin - back]
            first = section.pointer(of_code)
            last = first + section.pointer(of_code & FORMAT)
            if is_augmented:
                section.leb()
            found.append((first, last, section.pointer(of_handlers)))
        section.at = begin + size
    return sorted(found)


def shared_part(section: Cursor) -> tuple[int, int, bool]:
    """Return the encodings of pointers to code and to handlers in a CIE, and whether its functions have more fields."""
    section.take("B")
    letters = section.data[section.at : section.data.index(b"\0", section.at)].decode()
    section.at += len(letters) + 1
    section.leb(), section.leb(), section.leb()
    of_code = of_handlers = OMITTED
    if letters.startswith("z"):
        section.leb()
    for letter in letters[1:]:
        encoding = section.take("B")
        if letter == "R":
            of_code = encoding
        elif letter == "L":
            of_handlers = encoding
        else:
            section.pointer(encoding)
    return of_code, of_handlers, letters.startswith("z")


def handlers(table: Cursor, function: int) -> list[tuple[int, int, bool]]:
    """Return the ranges of a function's calls that may throw, and whether ``catch (...)`` is around each.

    An exception of a call outside of these ranges ends the process: the callee or the code around it is noexcept.
    """
    if (start := table.take("B")) != OMITTED:
        table.pointer(start)
    of_types = table.take("B")
    types = table.leb() + table.at if of_types != OMITTED else 0
    of_calls = table.take("B")
    actions = table.leb() + table.at
    found = []
    while table.at < actions:
        begin, length, pad = (table.pointer(of_calls) for _ in range(3))
        action = table.leb()
        is_caught = pad != 0 and action != 0 and catches_all(table.moved(actions + action - 1), types, of_types)
        found.append((function + begin, function + begin + length, is_caught))
    return found


def catches_all(action: Cursor, types: int, of_types: int) -> bool:
    """Return True if one of a chain of actions handles every exception: its type is null."""
    size = struct.calcsize(FORMATS[of_types & FORMAT])
    while True:
        kind = action.leb(signed=True)
        if kind > 0 and action.moved(types - kind * size).pointer(of_types) == 0:
            return True
        here = action.at
        if (step := action.leb(signed=True)) == 0:
            return False
        action = action.moved(here + step)


@dataclass(frozen=True)
class Call:
    """A call, or a jump to another function."""

    caller: str
    callee: str
    at: int


def calls_of(path: Path) -> list[Call]:
    """Return the calls in an extension whose targets are known."""
    command = ["objdump", "--disassemble", "--no-show-raw-insn", "--section=.text", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found, function = [], ""
    for name, at, what, symbol in FUNCTION_OR_CALL.findall(text):
        function = name.removesuffix(".cold") or function
        target = symbol.removesuffix(".cold").removesuffix("@plt")
        if target and (what == "call" or target != function):
            found.append(Call(function, target, int(at, 16)))
    return found


def uncaught(path: Path) -> list[str]:
    """Return calls in Cython's functions of an extension that may throw and are in no try block: caller, callee."""
    calls, parts = calls_of(path), sections(path)
    functions, table = frames(parts[".eh_frame"]), parts.get(".gcc_except_table", Cursor(b"", 0))
    begins = [begin for begin, _, _ in functions]
    ranges = {begin: handlers_at(table, begin, address) for begin, _, address in functions}

    def leaves(at: int) -> bool:
        """Return True if the exception of a call leaves the function: nothing catches it, nor is the call noexcept."""
        known = ranges[begins[bisect.bisect_right(begins, at) - 1]]
        return known is None or any(first <= at < last and not caught for first, last, caught in known)

    callers: dict[str, list[Call]] = {}
    for call in calls:
        callers.setdefault(call.callee, []).append(call)
    waiting = [name for name in callers if THROWS.match(name) and not THROWS_NOT.search(name)]
    throwing = set(waiting)
    found = []
    while waiting:
        for call in callers.get(waiting.pop(), ()):
            if not leaves(call.at):
                continue
            if GENERATED.match(call.caller):
                found.append(f"{call.caller} calls {call.callee}")
            elif call.caller not in throwing and not raises_our_error(call.caller):
                throwing.add(call.caller)
                waiting.append(call.caller)
    return sorted(found)


def raises_our_error(function: str) -> bool:
    """Return True for the function that throws a pagecore::Error; what may throw one is declared `except +`."""
    return "pagecore4fail" in function


def handlers_at(section: Cursor, function: int, address: int) -> list[tuple[int, int, bool]] | None:
    return handlers(section.moved(address - section.address), function) if address else None


def require_objdump() -> None:
    """Skip the test on a machine whose extensions `uncaught` cannot read."""
    if platform.machine() != "x86_64" or not sys.platform.startswith("linux"):
        missing("x86-64", "the tables of other machines differ")
    if shutil.which("objdump") is None:
        missing("objdump", "it is part of binutils")
