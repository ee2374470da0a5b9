"""The record of kernel resources: programs that were compiled without spills, by a digest of all that they depend on.

Compiling every kernel for every architecture takes half an hour of one core. The compiler is deterministic, so a
program needs no second check while its source, headers, flags and compiler are those of the record. `make kernels`
compiles all programs and writes the record anew; a difference in the file shows how a change affects registers.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from pagecore.ops.cuda.compilation.compiler import ARCHITECTURES
from pagecore.ops.cuda.compilation.cubins import cache_key, set_cache_folder
from pagecore.ops.cuda.compilation.manifest import Instance, instances
from pagecore.ops.cuda.compilation.usage import Failure, Usage, measure

# Cubins of earlier runs, shared by the processes of a run.
FOLDER = Path(__file__).parents[3] / "build" / "cubins"
RECORD = Path(__file__).parent / "usage_record.json"
SOURCES = sorted({each.source for each in instances()})


@functools.cache
def parsed(text: str) -> dict[str, Any]:
    return json.loads(text)


def of_source(source: str) -> list[Instance]:
    return [each for each in instances() if each.source == source]


def key_of(chosen: Sequence[Instance], architecture: str) -> str:
    """Return a digest of sources, headers, flags, compiler version and architecture of some instances."""
    keys = [cache_key([each], architecture) for each in chosen]
    return hashlib.sha256(" ".join(keys).encode()).hexdigest()[:32]


def recorded(source: str, architecture: str) -> list[Usage] | None:
    """Return the record of a source on one architecture; None if it is not of the present source and compiler."""
    chosen = of_source(source)
    entry = parsed(RECORD.read_text()).get(f"{source} {architecture}")
    if entry is None or entry["key"] != key_of(chosen, architecture):
        return None
    return [Usage(name, architecture, *figures) for name, figures in entry["kernels"].items()]


def subject_of(source: str) -> str:
    return Path(source).parts[0]


def compiled_always(source: str, architecture: str) -> list[Instance]:
    """Return the instances that are compiled in spite of the record: one of each subject, for one architecture.

    A subject is a folder of cuda_src with all that is in it. The digest of its sources selects the instance.
    PAGECORE_KERNELS=all selects all instances.
    """
    chosen = of_source(source)
    if os.environ.get("PAGECORE_KERNELS") == "all":
        return chosen
    sources = [each for each in SOURCES if subject_of(each) == subject_of(source)]
    at = int(key_of([of_source(each)[0] for each in sources], ARCHITECTURES[0]), 16)
    at, number = divmod(at, len(ARCHITECTURES))
    at, which = divmod(at, len(sources))
    if source != sources[which] or architecture != ARCHITECTURES[number]:
        return []
    return [chosen[at % len(chosen)]]


def write(*, all_programs: bool = True) -> None:
    """Compile kernels for every architecture, and record all of them, or those that the record lacks.

    The record is saved after each program, so that a run that is interrupted can be continued.
    """
    set_cache_folder(FOLDER)
    held = {} if all_programs else json.loads(RECORD.read_text())
    programs = {
        f"{source} {architecture}": (source, architecture) for architecture in ARCHITECTURES for source in SOURCES
    }
    entries = {name: entry for name, entry in held.items() if name in programs}
    for name, (source, architecture) in programs.items():
        chosen = of_source(source)
        if name not in entries or entries[name]["key"] != key_of(chosen, architecture):
            results = {each.kernel: each for each in measure(chosen, [architecture], os.cpu_count() or 1)}
            entries[name] = entry_of(chosen, architecture, results)
            save(entries)


def save(entries: dict[str, Any]) -> None:
    lines = []
    for name, entry in sorted(entries.items()):
        kernels = ",\n".join(f"  {json.dumps(each)}: {list(figures)}" for each, figures in entry["kernels"].items())
        lines.append(f'{json.dumps(name)}: {{"key": "{entry["key"]}", "kernels": {{\n{kernels}}}}}')
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def entry_of(chosen: Sequence[Instance], architecture: str, results: dict[str, Usage | Failure]) -> dict[str, Any]:
    """Return the entry of the instances of a source; exit if one of them does not compile."""
    figures = {}
    for instance in chosen:
        result = results[instance.name]
        if isinstance(result, Failure):
            raise SystemExit(f"{instance.name} for {architecture} does not compile:\n{result.message}")
        figures[instance.name] = astuple(result)[2:]
    return {"key": key_of(chosen, architecture), "kernels": figures}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=write.__doc__)
    parser.add_argument("--stale", action="store_true", help="keep the figures of programs that have not changed")
    write(all_programs=not parser.parse_args().stale)
