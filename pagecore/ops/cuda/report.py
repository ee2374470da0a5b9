"""``python -m pagecore.ops.cuda.report``: registers and spills of every kernel, and the kernels that serve a call."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pagecore.arrays.cuda.current import runtime
from pagecore.errors import PagecoreError
from pagecore.ops.cpu_count import usable_cores
from pagecore.ops.cuda.attention._attention import attention_kernel, launch_shape
from pagecore.ops.cuda.compilation.compiler import ARCHITECTURES, check_architecture, compiler_version
from pagecore.ops.cuda.compilation.cubins import set_cache_folder
from pagecore.ops.cuda.compilation.manifest import Instance, instances
from pagecore.ops.cuda.compilation.usage import Failure, Usage, measure, must_not_spill, resident_blocks

LEGEND = (
    "shared: dynamic shared bytes per block, if they do not depend on the call\n"
    "registers per thread; k: stack bytes; s: bytes of spill stores and loads; m: static shared bytes"
)
PATHS_LEGEND = "decode, prefill: matrix instructions; general: float32 multiply-adds, far slower for prompts"
# Dims of keys and values in the report. Other multiples of 8 up to 256 are padded like these.
DIMS = (
    *((dim, dim) for dim in (32, 64, 80, 96, 112, 128, 160)),
    (192, 128),
    *((dim, dim) for dim in (192, 256, 100, 512)),
)
# Kinds of arrays: dtypes of query, keys and values, and whether every row begins at a multiple of 16 bytes.
KINDS: dict[str, tuple[tuple[str, str, str], bool]] = {
    "float16": (("float16", "float16", "float16"), True),
    "bfloat16": (("bfloat16", "bfloat16", "bfloat16"), True),
    "16-bit, rows not at 16 bytes": (("bfloat16", "bfloat16", "bfloat16"), False),
    "mixed dtypes": (("bfloat16", "float16", "float16"), True),
    "float32": (("float32", "float32", "float32"), True),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile and print the table; return 1 for failed or spilling kernels, 2 if nothing can be compiled."""
    options = _parser().parse_args(arguments)
    if options.cache is not None:
        set_cache_folder(options.cache)
    chosen = [each for each in instances() if options.kernel in each.name]
    if not chosen:
        return _refuse(f"no kernel of the manifest has {options.kernel!r} in its name")
    begin = time.perf_counter()
    try:
        architectures = [check_architecture(_named(name)) for name in options.arch.split(",")]
        version = compiler_version()
        results = list(measure(chosen, architectures, options.jobs))
    except PagecoreError as error:
        return _refuse(str(error))
    seconds = time.perf_counter() - begin
    wrong = faults(chosen, results)
    if options.json is not None:
        text = as_json(chosen, results, version, seconds)
        sys.stdout.write(text) if str(options.json) == "-" else options.json.write_text(text)
    if str(options.json) != "-":
        print(f"{table(chosen, architectures, results)}\n{LEGEND}")
        if any(each.entry == "prefill" for each in chosen):
            print(f"\n{paths_table()}\n{PATHS_LEGEND}\n")
        print(f"NVRTC {version}: {len(results)} programs in {seconds:.1f} s with {options.jobs} processes")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m pagecore.ops.cuda.report", description=__doc__)
    parser.add_argument(
        "--arch",
        default=",".join(ARCHITECTURES),
        help="comma-separated; 'device': that of the first device (%(default)s)",
    )
    parser.add_argument("--kernel", default="", metavar="TEXT", help="only kernels with TEXT in their names")
    parser.add_argument("--jobs", type=_positive, default=usable_cores(), help="processes (%(default)s)")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures to FILE; -: stdout, without the table"
    )
    parser.add_argument("--cache", type=Path, metavar="FOLDER", help="folder of compiled kernels")
    return parser


def _named(architecture: str) -> str:
    return runtime().properties(0).architecture if architecture == "device" else architecture


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _refuse(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def faults(chosen: Sequence[Instance], results: Sequence[Usage | Failure]) -> list[str]:
    """Return a line for each kernel that failed, and for each that has spills or a stack and must not.

    Instances of one source mostly fail for the same reason, so only the first failure of a source includes its log.
    """
    strict = {each.name for each in chosen if must_not_spill(each)}
    sources = {each.name: each.source for each in chosen}
    lines, reported = [], set()
    for result in results:
        if isinstance(result, Failure):
            source = sources[result.kernel]
            message = "fails as well" if source in reported else result.message
            reported.add(source)
            lines.append(f"{result.kernel} for {result.architecture}: {message}")
        elif result.spills and result.kernel in strict:
            lines.append(
                f"{result.kernel} for {result.architecture} spills {result.spill_store_bytes} bytes out and "
                f"{result.spill_load_bytes} in; decode and prefill must not"
            )
        elif result.stack_bytes and result.kernel in strict:
            lines.append(
                f"{result.kernel} for {result.architecture} has a stack of {result.stack_bytes} bytes; decode and "
                "prefill must have none"
            )
    return lines


def table(chosen: Sequence[Instance], architectures: Sequence[str], results: Sequence[Usage | Failure]) -> str:
    """Return the table of kernels by architectures as text."""
    cells = {(result.kernel, result.architecture): cell(result) for result in results}
    rows = [["kernel", "shared", *architectures]]
    rows += [[each.name, shared(each), *(cells[each.name, name] for name in architectures)] for each in chosen]
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)


def paths() -> list[dict[str, Any]]:
    """Return the kernels for each pair of dims and each kind of arrays, selected as launches select them."""
    found = []
    for head_dim, value_dim in DIMS:
        for kind, (dtypes, aligned) in KINDS.items():
            kernels = {
                section: attention_kernel(head_dim, value_dim, *dtypes, aligned=aligned, decode=section == "decode")
                for section in ("decode", "prefill")
            }
            found.append({"head_dim": head_dim, "value_dim": value_dim, "arrays": kind, **kernels})
    return found


def paths_table() -> str:
    """Return the table of pairs of dims by kinds of arrays as text."""
    cells = {(each["head_dim"], each["value_dim"], each["arrays"]): _path(each) for each in paths()}
    rows = [["head dims", *KINDS]]
    for key, value in DIMS:
        name = str(key) if key == value else f"{key}, values {value}"
        rows.append([name, *(cells[key, value, kind] for kind in KINDS)])
    return _aligned(rows)


def _path(found: dict[str, Any]) -> str:
    """Shorten names: ``decode<pc_half,96,Plain>`` and ``prefill<pc_half,96,Plain>`` are "decode, prefill 96"."""
    decode, prefill = found["decode"].rstrip(">"), found["prefill"].rstrip(">")
    entry, _, arguments = decode.partition("<")
    dims = "/".join(part for part in arguments.split(",") if part.isdigit())
    entries = [entry] if decode == prefill else [entry, prefill.partition("<")[0]]
    return f"{', '.join(entries)} {dims}"


def shared(instance: Instance) -> str:
    """Return the dynamic shared bytes per block, or "-" if they depend on the call."""
    shape = launch_shape(instance.entry, instance.arguments)
    return "-" if shape is None else str(shape[1])


def cell(result: Usage | Failure) -> str:
    """Return the registers, followed by the figures that are not 0."""
    if isinstance(result, Failure):
        return "failed"
    text = str(result.registers)
    if result.stack_bytes:
        text += f" k{result.stack_bytes}"
    if result.spills:
        text += f" s{result.spill_store_bytes}+{result.spill_load_bytes}"
    if result.static_shared_bytes:
        text += f" m{result.static_shared_bytes}"
    return text


def as_json(chosen: Sequence[Instance], results: Sequence[Usage | Failure], version: str, seconds: float) -> str:
    """Return all figures as JSON."""
    shapes = {each.name: launch_shape(each.entry, each.arguments) or (None, None) for each in chosen}
    launches = {name: {"threads": shape[0], "dynamic_shared_bytes": shape[1]} for name, shape in shapes.items()}
    kernels = [
        asdict(result) | launches[result.kernel] | _residence(result, *shapes[result.kernel]) for result in results
    ]
    figures = {"nvrtc": version, "seconds": round(seconds, 1), "kernels": kernels, "paths": paths()}
    return json.dumps(figures, indent=1) + "\n"


def _residence(result: Usage | Failure, threads: int | None, shared_bytes: int | None) -> dict[str, int]:
    if isinstance(result, Failure) or threads is None or shared_bytes is None:
        return {}
    return {"resident_blocks": resident_blocks(result, threads, shared_bytes)}


if __name__ == "__main__":
    sys.exit(main())
