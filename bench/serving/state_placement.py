"""Tokens that states save a prefix cache which knows the requests to come: bounds for the online rules.

`best_state_hits` also places states where only later prompts branch off. No online rule can: the first request with a
shared prompt does not show where it ends. `informed_state_hits` places them as the cache does. Both evict by Belady's
rule: the state that is asked for last goes first.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt


def best_state_hits(prompts: Sequence[npt.ArrayLike], grid: int, slots: int) -> list[int]:
    """Return the tokens before the deepest kept state of each prompt, for prompts that are served in turn.

    A prompt may leave a state at every multiple of `grid`, and up to `slots` states stay after it: those that a later
    prompt asks for first (Belady), the longest of those that the same prompt asks for.
    """
    names = [prefix_names(np.asarray(prompt, np.int32), grid) for prompt in prompts]
    usable = [(len(prompt) - 1) // grid for prompt in map(np.asarray, prompts)]  # a hit leaves a token to compute
    asked: dict[Hashable, list[int]] = {}
    for number, own in enumerate(names):
        for name in own[: usable[number]]:
            asked.setdefault(name, []).append(number)
    depths = {name: depth for own in names for depth, name in enumerate(own, 1)}
    kept: set[Hashable] = set()
    hits = []
    for number, own in enumerate(names):
        hits.append(grid * max((depths[name] for name in own[: usable[number]] if name in kept), default=0))
        at = {name: next_use(asked.get(name, []), number) for name in {*kept, *own}}
        deepest: dict[float, Hashable] = {}
        for name in sorted(at, key=lambda name: depths[name]):
            if at[name] < len(prompts):
                deepest[at[name]] = name
        kept = set(sorted(deepest.values(), key=lambda name: at[name])[:slots])
    return hits


def informed_state_hits(prompts: Sequence[npt.ArrayLike], grid: int, slots: int) -> list[int]:
    """Return the tokens before the deepest kept state of each prompt, if each leaves one state where the cache would.

    That is where the prompt departs from all before it, if this is after the state that it begins with, and its end
    otherwise. Up to `slots` states stay: first the longest that each later prompt asks for, in the order of these.
    """
    names = [prefix_names(np.asarray(prompt, np.int32), grid) for prompt in prompts]
    usable = [(len(prompt) - 1) // grid for prompt in map(np.asarray, prompts)]
    asked: dict[Hashable, list[int]] = {}
    for number, own in enumerate(names):
        for name in own[: usable[number]]:
            asked.setdefault(name, []).append(number)
    depths = {name: depth for own in names for depth, name in enumerate(own, 1)}
    seen: set[Hashable] = set()
    kept: set[Hashable] = set()
    hits = []
    for number, own in enumerate(names):
        hit = max((depths[name] for name in own[: usable[number]] if name in kept), default=0)
        hits.append(grid * hit)
        shared = next((depth for depth, name in enumerate(own) if name not in seen), len(own))
        left = own[min(shared, usable[number]) - 1 if min(shared, usable[number]) > hit else -1 :][:1]
        seen.update(own)
        at = {name: next_use(asked.get(name, []), number) for name in {*kept, *left}}
        useful = sorted((name for name in at if at[name] < len(prompts)), key=lambda name: (at[name], -depths[name]))
        deepest = {at[name]: name for name in reversed(useful)}
        kept = set(sorted(useful, key=lambda name: (deepest[at[name]] != name, at[name]))[:slots])
    return hits


def next_use(numbers: Sequence[int], number: int) -> float:
    """Return the first of ascending numbers after another, or infinity."""
    place = bisect.bisect_right(numbers, number)
    return numbers[place] if place < len(numbers) else float("inf")


def prefix_names(prompt: npt.NDArray[np.int32], grid: int) -> list[Hashable]:
    """Return a name for each prefix of whole steps of the grid, equal for equal prefixes."""
    found: list[Hashable] = []
    name = 0
    for start in range(0, len(prompt) - grid + 1, grid):
        name = hash((name, prompt[start : start + grid].tobytes()))
        found.append(name)
    return found
