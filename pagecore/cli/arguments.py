"""Argument parser of the command line."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from pagecore.cli import commands, whatif
from pagecore.cli.outcomes import REFUSED
from pagecore.serving.info import installed_version
from pagecore.serving.replay.options import (
    DEFAULT_BYTES_PER_TOKEN,
    DEFAULT_MEMORY,
    UNBOUNDED,
    ReplayOptions,
)
from pagecore.serving.replay.trace import HASH_BLOCK, MILLISECONDS
from pagecore.serving.replay.trace_turns import TURNS
from pagecore.serving.scheduling.reuse import POLICIES


class _Parser(argparse.ArgumentParser):
    """Parser that reports an error in one line, like every other error of the command."""

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"{self.prog}: {message}; see {self.prog} --help\n")


class _ListFamilies(argparse.Action):
    """Option that prints the supported model types and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_given: object) -> NoReturn:
        commands.list_families()
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """Return the parser; the parsed arguments include the `command` function."""
    parser = _Parser(prog="pagecore", description="A paged key-value (KV) cache for transformers.")
    parser.add_argument("--version", action="version", version=f"pagecore {installed_version('pagecore') or 'unknown'}")
    added = parser.add_subparsers(required=True, metavar="{info,demo,replay,plan,whatif}")
    info = added.add_parser("info", help="show versions, instruction set, threads and CUDA devices")
    info.set_defaults(command=commands.show_info)
    demo = added.add_parser("demo", help="serve two dozen chat requests and verify every token")
    demo.add_argument(
        "--model",
        choices=commands.DEMO_MODELS,
        default=commands.DEMO_MODELS[0],
        help="dense: attention in every layer; hybrid: Mamba-2 and gated delta layers between them (dense)",
    )
    demo.add_argument("--seed", type=int, default=0, metavar="N", help="seed of weights, prompts and sampling (0)")
    demo.add_argument("--swap", action="store_true", help="swap preempted sequences out instead of recomputing them")
    demo.add_argument("--host", metavar="SIZE", help="keep evicted prefixes in host memory, such as 64MiB")
    _add_evict(demo)
    _add_pictures(demo)
    demo.set_defaults(command=commands.run_demo)
    _add_replay(added.add_parser("replay", help="run a recorded trace through the scheduler and the cache"))
    _add_plan(added.add_parser("plan", help="show the blocks, tokens and requests of a model that fit into a memory"))
    _add_whatif(added.add_parser("whatif", help="show the hits of a trace for every size of the cache"))
    return parser


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help="a Mooncake trace or token ids as JSON lines, CSV with lengths (BurstGPT, Azure), or - for the "
        "standard input; may end in .gz or .zst",
    )
    _add_replayed_machine(parser)
    _add_replayed_tiers(parser)
    _add_evict(parser)
    _add_replayed_scheduler(parser)
    _add_replayed_clock(parser)
    _add_replayed_turns(parser)
    parser.add_argument("--requests", type=int, metavar="N", help="replay only the first N requests")
    _add_units(parser)
    parser.add_argument("--prefill-only", action="store_true", help="compute the prompts and generate nothing")
    parser.add_argument(
        "--attend", action="store_true", help="write and attend real keys and values, and check samples against float64"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the report to FILE")
    parser.add_argument(
        "--metrics-port", type=int, metavar="N", help="serve metrics for Prometheus on this port of 127.0.0.1 meanwhile"
    )
    _add_pictures(parser)
    parser.set_defaults(command=commands.run_replay)


def _add_replayed_machine(parser: argparse.ArgumentParser) -> None:
    """Add the memory of the modelled machine, and the model that divides it."""
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--memory", help=f"KV memory of the modelled machine: bytes, or such as 64GiB ({DEFAULT_MEMORY})")
    size.add_argument(
        "--blocks",
        type=_blocks,
        metavar=f"N|{UNBOUNDED}",
        help="number of blocks, the null block counted, instead of memory; unbounded: enough for the whole trace",
    )
    _add_modelled_tokens(parser)
    parser.add_argument(
        "--num-states", type=int, metavar="N", help="number of state slots, the null slot counted, instead of the ratio"
    )
    parser.add_argument(
        "--prompt-checkpoints",
        type=int,
        metavar="N",
        help="states that a prompt keeps before its end: 512, 2048, ... tokens before it (4)",
    )
    _add_state_ratio(parser)
    parser.add_argument(
        "--swap-memory",
        metavar="MEMORY",
        help="swap preempted requests out to a second memory, such as 16GiB",
    )


def _add_replayed_tiers(parser: argparse.ArgumentParser) -> None:
    """Add host memory and stores, to which evicted prefixes move."""
    parser.add_argument("--host", metavar="MEMORY", help="continue evicted prefixes in host memory, such as 256GiB")
    parser.add_argument(
        "--disk",
        metavar="DIR|SIZE",
        help="keep them on a disk, too: a size or 'unbounded' to count only; a folder with --attend",
    )
    parser.add_argument(
        "--remote",
        metavar="URL|SIZE",
        help="keep them in a shared store, too: a size or 'unbounded' to count only; with --attend the URL of a store, "
        "such as redis://HOST or s3://BUCKET",
    )
    parser.add_argument(
        "--bandwidth",
        nargs="+",
        default=(),
        metavar="MEDIUM=GB/S",
        help="derive the time of reads from GB/s of host, disk and remote, such as disk=2.5",
    )


def _add_replayed_scheduler(parser: argparse.ArgumentParser) -> None:
    """Add the options of the scheduler, whose defaults are those of `ReplayOptions`."""
    defaults = {field.name: field.default for field in fields(ReplayOptions)}
    parser.add_argument(
        "--policy",
        choices=("fcfs", "lpm"),
        default=defaults["policy"],
        help=f"order of admission: by arrival, or the longest cached prefix first ({defaults['policy']})",
    )
    numbers = {
        "block-size": "tokens of a block",
        "max-tokens-per-step": "maximum number of tokens of a step, prompt and decode together",
        "max-running": "maximum number of concurrent sequences",
        "seed": "seed of the keys and values of --attend",
    }
    for name, text in numbers.items():
        default = defaults[name.replace("-", "_")]
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} ({default})")


def _add_replayed_turns(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--turns",
        choices=TURNS,
        help="replay requests of one conversation as turns of one resumable request: those that chat_id and "
        "parent_chat_id name, or those whose prompts begin with an earlier prompt; needs --prefill-rate",
    )


def _add_replayed_clock(parser: argparse.ArgumentParser) -> None:
    """Add the speed of the modelled machine."""
    parser.add_argument(
        "--prefill-rate",
        type=float,
        metavar="N",
        help="tokens computed in a second: queue requests when they arrive, and report latencies",
    )
    parser.add_argument(
        "--step-ms", type=float, default=0.0, metavar="MS", help="milliseconds of a step in addition (0)"
    )
    parser.add_argument(
        "--max-queued", type=int, metavar="N", help="reject requests that arrive while N others wait for admission"
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="CONFIG", help="config.json or params.json of a model, or its folder")
    parser.add_argument("--families", action=_ListFamilies, nargs=0, help="list the supported model types and exit")
    memory = parser.add_mutually_exclusive_group(required=True)
    memory.add_argument("--memory", help="KV memory on one rank: bytes, or such as 40GiB")
    memory.add_argument("--device-memory", help="memory of a device, such as 80GiB, for weights, cache and activations")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="number of tensor-parallel ranks (1)")
    parser.add_argument("--block-size", type=int, metavar="N", help="tokens of a block (16, or what formats need)")
    _add_device(parser.add_argument_group("with --device-memory"))
    parser.add_argument(
        "--context",
        type=int,
        nargs="+",
        metavar="N",
        help="lengths of requests (a few, up to the model's longest)",
    )
    _add_state_ratio(parser)
    parser.add_argument(
        "--dtype", default="auto", help="dtype of keys and values: auto (the model's), bfloat16, float16 ..."
    )
    parser.add_argument(
        "--kv-format",
        default="auto",
        metavar="FORMAT",
        help="format of stored keys and values: auto (the config's), none, float8_e4m3fn, int8_token, nvfp4 ...",
    )
    parser.add_argument(
        "--value-format", metavar="FORMAT", help="format of stored values, if it is another than that of keys"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the plan to FILE")
    parser.set_defaults(command=commands.show_plan)


def _add_whatif(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help="a Mooncake trace, token ids or KV events as JSON lines, or CSV; may end in .gz or .zst",
    )
    parser.add_argument(
        "--memory",
        default="8GiB..1TiB",
        help="KV memory, sizes such as 8GiB,64GiB, or a range such as 8GiB..1TiB (the default)",
    )
    parser.add_argument("--points", type=int, default=57, metavar="N", help="sizes of the range (57)")
    parser.add_argument(
        "--block-size", type=int, nargs="+", default=[16], metavar="N", help="tokens of a block; a curve for each (16)"
    )
    policies = POLICIES[:-1]
    parser.add_argument(
        "--evict",
        nargs="+",
        default=[policies[0]],
        metavar="POLICY",
        help=f"eviction policies: {', '.join(policies)}, or slru:SHARE; a curve for each ({policies[0]})",
    )
    _add_modelled_tokens(parser)
    parser.add_argument(
        "--tier",
        action="append",
        default=[],
        metavar="NAME=SIZE",
        help="a tier, such as --tier GPU=64GiB --tier CPU=256GiB; each holds what the one before holds, and more",
    )
    parser.add_argument(
        "--sample", type=float, default=1.0, metavar="SHARE", help="follow only a share of the blocks, for huge traces"
    )
    parser.add_argument("--requests", type=int, metavar="N", help="use only the first N requests")
    _add_units(parser)
    parser.add_argument(
        "--prefill-rate", type=float, default=10_000.0, metavar="N", help="tokens computed in a second (10000)"
    )
    for kind, text in (("html", "a page with charts"), ("png", "a picture"), ("json", "the figures")):
        parser.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"write {text} to FILE")
    parser.set_defaults(command=whatif.show_whatif)


def _add_device(group: argparse._ArgumentGroup) -> None:
    """Add the fields of `DeviceOptions`; an option that is not given is None."""
    group.add_argument(
        "--weights", help="auto (counted), a format (fp8, int4, bfloat16 ...), or bytes on one rank (auto)"
    )
    numbers = {
        "--data-parallel": "groups of data-parallel attention (1)",
        "--pipeline-stages": "stages among which the layers are divided, of --ranks ranks each (1)",
        "--chunked-prefill-size": "tokens of prompts in a step (by device)",
        "--graph-batch": "requests of the largest graph (by device)",
        "--images": "images that are encoded in one step (1)",
        "--image-size": "pixels along each side of an image (the model's, or 1024)",
    }
    for name, text in numbers.items():
        group.add_argument(name, type=int, metavar="N", help=text)
    group.add_argument("--static-fraction", type=float, metavar="F", help="share of weights and cache (by reserves)")
    group.add_argument(
        "--draft",
        metavar="KIND",
        help="speculation: standalone, eagle, ngram, mtp (the checkpoint's own layers) or medusa (heads)",
    )
    group.add_argument("--draft-model", metavar="CONFIG", help="config of the draft")
    group.add_argument("--embedding-cache", metavar="BYTES", help="memory for embeddings of images (100MiB)")


def _add_modelled_tokens(parser: argparse.ArgumentParser) -> None:
    """Add the bytes of a token in the modelled machine."""
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", metavar="CONFIG", help="config.json of the modelled model, or its folder")
    model.add_argument(
        "--bytes-per-token",
        type=int,
        metavar="N",
        help=f"bytes of key and value of one token in all layers ({DEFAULT_BYTES_PER_TOKEN}, Llama 3 8B in bfloat16)",
    )


def _add_state_ratio(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--state-ratio",
        type=float,
        default=0.9,
        metavar="R",
        help="bytes of recurrent states over bytes of blocks, for a model with both (0.9)",
    )
    parser.add_argument(
        "--checkpoint-format", choices=["int8"], help="store checkpoints of recurrent states as int8 codes (exact)"
    )


def _add_units(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hash-block",
        type=int,
        metavar="N",
        help=f"tokens that a hash id of the trace names ({HASH_BLOCK}; 16 in Qwen-Bailian traces)",
    )
    parser.add_argument(
        "--time-unit",
        choices=list(MILLISECONDS),
        help="unit of the timestamps (ms in JSON lines, s in CSV and Qwen-Bailian traces)",
    )


def _blocks(text: str) -> int | str:
    """Parse the value of --blocks."""
    if text == UNBOUNDED:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {UNBOUNDED!r}") from None


def _add_evict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--evict",
        default=POLICIES[0],
        metavar="POLICY",
        help=f"eviction policy: {', '.join(POLICIES[:-1])}, or slru:SHARE; {POLICIES[-1]} turns prefix reuse off "
        f"({POLICIES[0]})",
    )


def _add_pictures(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw use, queue, preemptions and the block map")
    parser.add_argument("--live", action="store_true", help="show the live block map in the terminal")
