"""Allocations in generated code: each is in a try block, so that a failure raises MemoryError."""

from pathlib import Path

from tests.capabilities import missing
from tests.exceptions import calls_of, require_objdump, uncaught

PAGECORE = Path(__file__).parent.parent / "pagecore"
# Calls that find their memory reserved, in functions that cannot fail: part of the caller's name, and of the callee's.
RESERVED = [("find_held_once_raw", "find_held_once")]


def is_reserved(call):
    caller, callee = call.split(" calls ")
    return any(one in caller and other in callee for one, other in RESERVED)


def test_direct_calls_of_generated_code_catch_failed_allocations():
    require_objdump()
    modules = sorted(PAGECORE.rglob("_*.so"))
    if not modules:
        missing("extensions", "build them in place: make build")
    assert any(call.callee == "_Znwm" for path in modules for call in calls_of(path)), "no call of operator new is seen"
    found = [f"{path.name}: {call}" for path in modules for call in uncaught(path) if not is_reserved(call)]
    assert not found, "\n".join(found)
