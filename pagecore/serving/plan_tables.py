"""Tables of a memory plan."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from pagecore.models.multimodal.known_types import known_types
from pagecore.serving.tables import human_bytes

if TYPE_CHECKING:
    from pagecore.serving.plans import GroupPlan, ModelPlan
    from pagecore.storage import Spec

__all__ = ["class_columns", "context_columns", "family_lines", "group_columns", "plan_rows", "state_columns"]

Columns = tuple[list[str], list[list[str]]]


def family_lines() -> list[str]:
    """Return the supported values of `model_type`, in lines of up to 100 characters."""
    return textwrap.wrap(" ".join(known_types()), 100, break_long_words=False, break_on_hyphens=False)


def plan_rows(plan: ModelPlan) -> list[tuple[str, str]]:
    """Return the name and value of each line of the summary."""
    model, memory = plan.model, plan.memory
    longest = "" if model.max_length is None else f", up to {model.max_length:,} tokens"
    where = "the largest group" if len(memory.groups) > 1 else "the pool"
    rank = f" on each of {memory.ranks} ranks" if memory.ranks > 1 else ""
    rows = [("model", f"{model.model_type}, {model.num_layers} layers{longest}"), *_device_rows(plan)]
    rows.append(("memory", f"{human_bytes(memory.memory)} for the cache{rank}"))
    if memory.groups:
        rows += [
            ("bytes per token", f"{human_bytes(memory.bytes_per_token)} in all layers{rank}"),
            ("blocks", f"{memory.num_blocks - 1:,} of {memory.block_size} tokens each in {where}"),
            ("tokens", f"{memory.num_tokens:,}"),
        ]
    if memory.states is not None:
        states = memory.states
        share = "" if states.state_ratio is None else f", {states.state_ratio:g} times the bytes of the blocks"
        rows += [
            ("bytes per state", f"{human_bytes(states.bytes_per_slot)} of a sequence in all layers{rank}"),
            ("state slots", f"{states.num_slots - 1:,}{share}"),
        ]
        if states.num_checkpoints:
            each = human_bytes(states.bytes_per_checkpoint)
            rows.append(("int8 checkpoints", f"{states.num_checkpoints - 1:,} of {each} each"))
    return rows


def _device_rows(plan: ModelPlan) -> list[tuple[str, str]]:
    device = plan.device
    if device is None:
        return []
    ranks = f", one of {device.ranks} ranks" if device.ranks > 1 else ""
    groups = f" in {device.data_parallel} groups of attention" if device.data_parallel > 1 else ""
    first, end = device.layers
    worst = (
        f"{device.stage + 1} of {device.pipeline_stages}, which holds the fewest requests: layers {first} to {end - 1}"
    )
    stages = [("worst stage", worst)] if device.pipeline_stages > 1 else []
    vision = f", with a factor of {device.vision_factor:.4g} for vision" if device.vision_factor != 1 else ""
    return [
        ("device", f"{human_bytes(device.device_memory)}{ranks}{groups}"),
        *stages,
        ("steps", f"prefill of {device.chunked_prefill_size:,} tokens, graphs of {device.graph_batch:,} requests"),
        ("static fraction", f"{device.static_fraction:.6f} for weights and cache{vision}"),
    ]


def class_columns(plan: ModelPlan) -> Columns:
    """Return the headings and lines of the table of a device's memory; no lines for a plan of the cache alone."""
    headings = ["memory", "on each rank", "taken", "certainty"]
    device = plan.device
    if device is None:
        return headings, []
    lines = [[each.name, human_bytes(each.nbytes), each.taken, each.certainty] for each in device.classes]
    last = ["missing", human_bytes(-device.free)] if device.free < 0 else ["left", human_bytes(device.free)]
    return headings, [*lines, [*last, "", ""]]


def group_columns(plan: ModelPlan) -> Columns:
    """Return the headings and lines of the table of groups."""
    headings = ["group", "layers", "window", "planes", "bytes per token", "bytes per block", "blocks"]
    return headings, [_group_line(number, group) for number, group in enumerate(plan.memory.groups)]


def state_columns(plan: ModelPlan) -> Columns:
    """Return the headings and lines of the table of states, a line for each kind of layer; no lines without states."""
    states = plan.memory.states
    headings = ["layers", "planes", "bytes per layer", "chunk", "interval"]
    specs = () if states is None else states.specs
    return headings, [
        [str(specs.count(spec)), _planes(spec), f"{spec.nbytes:,}", str(spec.chunk), str(spec.interval)]
        for spec in dict.fromkeys(specs)
    ]


def context_columns(plan: ModelPlan) -> Columns:
    """Return the headings and lines of the table of contexts; with several pools it includes the best split.

    Blocks and slots are those of one request.
    """
    groups, states = len(plan.memory.groups), plan.memory.states is not None
    several = groups + states > 1
    lines = []
    for context in plan.memory.contexts:
        line = [f"{context.context:,}", _added(context.blocks_per_request)]
        line += [f"{context.slots_per_request:,}"] * states + [f"{context.requests:,}"]
        if several:
            best = context.best_num_blocks
            line += [f"{context.best_requests:,}", "none" if best is None else str(list(best))]
            line += ["none" if context.best_num_states is None else f"{context.best_num_states:,}"] * states
        lines.append(line)
    headings = ["context", *(["blocks", "slots"] if states else ["blocks per request"]), "requests"]
    return headings + (["best split", "its num_blocks"] + ["its num_states"] * states if several else []), lines


def _group_line(number: int, group: GroupPlan) -> list[str]:
    return [
        str(number),
        str(group.num_layers),
        _reach(group),
        _planes(group.spec),
        f"{group.bytes_per_token:,.0f}",
        f"{group.bytes_per_block:,}",
        f"{group.num_blocks - 1:,}",
    ]


def _reach(group: GroupPlan) -> str:
    if group.is_cross:
        return "encoder"
    if group.chunk is not None:
        return f"chunks of {group.chunk:,}"
    if group.window is None:
        return "all"
    return f"{group.window:,}" + (f" + {group.sink_tokens:,}" if group.sink_tokens else "")


def _planes(spec: Spec) -> str:
    """Format planes with their shapes and dtypes; planes of equal shape and dtype are listed together."""
    alike: dict[str, list[str]] = {}
    for plane in spec.planes:
        alike.setdefault(f"{' x '.join(map(str, plane.shape))} {plane.dtype}", []).append(plane.name)
    return "; ".join(f"{', '.join(names)} {what}" for what, names in alike.items())


def _added(counts: tuple[int, ...]) -> str:
    return " + ".join(f"{count:,}" for count in counts) or "none"
