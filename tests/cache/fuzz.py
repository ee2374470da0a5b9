"""Random calls with foreign arguments: python -m tests.cache.fuzz TARGET,... SEED COUNT.

Each exception that is not a PagecoreError and each broken invariant is a line of JSON: method, foreign arguments,
exception, message. The line before each call names it, in case the process crashes there.
"""

import contextlib
import faulthandler
import json
import os
import re
import resource
import sys

import numpy as np

from pagecore import PagecoreError, set_num_threads
from tests.cache.foreign import calls_back, foreign_value
from tests.cache.fuzz_targets import TARGETS

MEMORY = 6 << 30  # bytes of address space: limits allocations of sizes that the fuzzer chooses
SECONDS = 20  # limit of one call
RENEWED = 25  # calls after which a new target is made


def main(names: list[str], seed: int, count: int) -> None:
    set_num_threads(1)
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for name in names:
        fuzz(name, seed, count)


def fuzz(name: str, seed: int, count: int) -> None:
    """Make `count` calls of a target."""
    random = np.random.default_rng([seed, list(TARGETS).index(name)])
    target = None
    for i in range(count):
        if target is None or i % RENEWED == 0:
            if target is not None:
                finish(target)
            target = TARGETS[name](random)
        if not call_once(target, random):
            target = None


def finish(target) -> None:
    try:
        target.finish()
    except Exception as error:
        report("the end", {}, f"broken state: {type(error).__name__}", error)


def call_once(target, random) -> bool:
    """Make one call; return True if the target is still usable."""
    words = target.methods[random.integers(len(target.methods))].split()
    arguments, options, foreign = chosen(target, words[1:], random)
    os.write(1, f"call {words[0]} {foreign}\n".encode(errors="backslashreplace"))
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    function = resolve(target, words[0])
    state = getattr(target, "state", None)
    may_change = any(calls_back(value) for value in (*arguments, *options.values()))
    before = state() if state and not may_change else None
    try:
        result = function(*arguments, **options)
        if hasattr(result, "__next__"):
            list(result)
    except PagecoreError as error:
        if before is not None and state() != before:
            report(words[0], foreign, "changed something", error)
            return False
    except Exception as error:
        report(words[0], foreign, type(error).__name__, error)
    try:
        target.check()
    except Exception as error:
        report(words[0], foreign, "broken state", error)
        return False
    finally:
        faulthandler.cancel_dump_traceback_later()
    return True


def chosen(target, words, random):
    """Return the arguments and options of a call, and the foreign ones by name."""
    foreign_count = random.choice([0, 1, 1, 1, 1, 2])
    picked = [word for word in words if "=" not in word or random.integers(3) == 0]
    strange = set(random.permutation(len(picked))[:foreign_count].tolist())
    arguments, options, foreign = [], {}, {}
    for i, word in enumerate(picked):
        name, kind = re.split("[:!=]", word)
        value = getattr(target, kind)()
        if i in strange:
            value = foreign_value(value, random, target.callback)
        if i in strange:
            foreign[name] = shown(value)
        if ":" in word:
            arguments.append(value)
        else:
            options[name] = value
    return arguments, options, foreign


def resolve(target, path):
    first, *rest = path.split(".")
    found = target.named[first]
    for name in rest:
        found = getattr(found, name)
    return found


def shown(value):
    with contextlib.suppress(Exception):
        text = " ".join(repr(value).split())
        return text if len(text) < 70 else f"{text[:60]}..."
    return f"a {type(value).__name__}"


def report(method, foreign, kind, error):
    message = " ".join(str(error).split())[:160]
    os.write(1, (json.dumps([method, foreign, kind, message]) + "\n").encode(errors="backslashreplace"))


if __name__ == "__main__":
    main(sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]))
