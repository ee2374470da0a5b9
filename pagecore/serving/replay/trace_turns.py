"""Turns of conversations in a trace: which request continues which.

A request may continue an earlier one if its prompt is longer than the prompt and the answer of that one, and begins
with the whole blocks of its prompt. An earlier request is continued once, by the first that may. A second answer to the
same turn, or an edited prompt, is a separate request, unless it begins with a shorter prompt that none has continued.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal, TypeAlias

import numpy as np

from pagecore.errors import UnsupportedOption
from pagecore.serving.replay.trace_request import TraceRequest
from pagecore.storage.checks import shown

__all__ = ["TURNS", "TraceTurns", "Turns", "check_turns", "find_turns"]

Turns: TypeAlias = Literal["ids", "prompts"]
TURNS = ("ids", "prompts")
# Tokens of a block of token ids, and whole blocks of hash ids that a prompt needs to be found in later ones.
TOKENS = 16
LEAST_BLOCKS = 2


def check_turns(turns: object) -> None:
    """Raise UnsupportedOption unless `turns` is None, "ids" or "prompts"."""
    if turns is not None and (not isinstance(turns, str) or turns not in TURNS):
        raise UnsupportedOption(f"turns is {shown(turns)}; expected 'ids' or 'prompts', or None for separate requests")


@dataclass(frozen=True, slots=True)
class TraceTurns:
    """Turns of a trace.

    Attributes
    ----------
    earlier : dict of int to int
        The number of the request that each request continues.
    num_unlike : int
        Requests whose ids or prompts name an earlier one that they cannot continue: it is continued already, or the
        prompts differ.
    """

    earlier: dict[int, int] = field(default_factory=dict)
    num_unlike: int = 0


@dataclass(frozen=True, slots=True)
class _Prompt:
    """End of a prompt: the digest of its whole blocks, and the token ids after them, if the trace has them."""

    number: int
    length: int
    num_blocks: int
    digest: bytes
    tail: bytes


def find_turns(requests: Iterable[TraceRequest], turns: Turns, name: str) -> TraceTurns:
    """Return which requests of a trace continue which.

    Parameters
    ----------
    requests : iterable of TraceRequest
    turns : {"ids", "prompts"}
        With "ids" a request continues the latest one whose `chat_id` is its `parent_chat_id`, or its `chat_id` if it
        has no such field. With "prompts" it continues, of the requests that it may continue, the one with the longest
        prompt with which its own begins: all token ids, or with hash ids two whole blocks or more. Of equal prompts
        only the latest counts.
    name : str
        Name of the trace, for messages.

    Raises
    ------
    UnsupportedOption
        No request has the field, or the prompts, that `turns` needs.
    """
    chats: dict[Hashable, _Prompt] = {}
    prompts: dict[bytes, dict[bytes, _Prompt]] = {}
    continued: set[int] = set()
    found: dict[int, int] = {}
    unlike = 0
    has_any = False
    for line in requests:
        has_any = has_any or (line.chat is not None if turns == "ids" else _has_content(line))
        before = line.input_length + line.output_length
        digests = list(_digests(line))
        if turns == "ids":
            named = chats.get((line.namespace, line.earlier_chat)) if line.earlier_chat is not None else None
            matches: Iterable[_Prompt] = () if named is None else (named,)
        else:
            matches = _matches(line, digests, prompts)
        has_match = False
        for earlier in matches:
            has_match = True
            if earlier.number not in continued and _may_continue(line, digests, earlier):
                found[line.number] = earlier.number
                continued.add(earlier.number)
                break
        else:
            unlike += has_match
        end = _Prompt(line.number, before, len(digests) - 1, digests[-1], _tail(line))
        if turns == "ids" and line.chat is not None:
            chats[line.namespace, line.chat] = end
        elif turns == "prompts" and (end.tail or (_has_content(line) and end.num_blocks >= LEAST_BLOCKS)):
            prompts.setdefault(end.digest, {})[end.tail] = end
    if not has_any:
        needed = "a chat_id; use 'prompts'" if turns == "ids" else "hash ids or token ids; leave turns out"
        raise UnsupportedOption(f"turns is {turns!r}, but no request of trace {name} has {needed}")
    return TraceTurns(found, unlike)


def _has_content(line: TraceRequest) -> bool:
    return line.token_ids is not None or line.hash_ids is not None


def _digests(line: TraceRequest) -> Iterator[bytes]:
    """Yield a digest of the namespace, and of the prompt up to the end of each whole block."""
    hashed = blake2b(repr(line.namespace).encode(), digest_size=16)
    yield hashed.digest()
    if line.token_ids is not None:
        blocks: Iterable[bytes] = (
            line.token_ids[start : start + TOKENS].tobytes()
            for start in range(0, line.input_length // TOKENS * TOKENS, TOKENS)
        )
    else:
        ids = (line.hash_ids or ())[: line.input_length // line.hash_block]
        blocks = (block.to_bytes(8, "little") for block in ids)
    for block in blocks:
        hashed.update(block)
        yield hashed.digest()


def _tail(line: TraceRequest) -> bytes:
    """Return the token ids of a prompt after its whole blocks, and a mark that it ends there; b"" for hash ids."""
    if line.token_ids is None:
        return b""
    return b"t" + line.token_ids[line.input_length // TOKENS * TOKENS :].tobytes()


def _may_continue(line: TraceRequest, digests: list[bytes], earlier: _Prompt) -> bool:
    """Return True if a prompt has tokens after an earlier prompt and its answer, and begins with its whole blocks."""
    begins = digests[earlier.num_blocks : earlier.num_blocks + 1]
    return line.input_length > earlier.length and begins == [earlier.digest]


def _matches(line: TraceRequest, digests: list[bytes], prompts: dict[bytes, dict[bytes, _Prompt]]) -> Iterator[_Prompt]:
    """Yield the earlier prompts with which a prompt begins, the longest first."""
    for count in range(len(digests) - 1, -1, -1):
        tails = prompts.get(digests[count])
        if tails is None:
            continue
        names = [b""]
        if line.token_ids is not None:
            rest = line.token_ids[count * TOKENS : (count + 1) * TOKENS]
            longest = min(len(rest), TOKENS - 1)
            names = [b"t" + np.asarray(rest[:length]).tobytes() for length in range(longest, -1, -1)]
        for name in names:
            if (end := tails.get(name)) is not None:
                yield end
