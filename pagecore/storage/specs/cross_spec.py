"""CrossSpec: the spec of a cross-attention layer, which attends to the output of an encoder."""

from __future__ import annotations

from dataclasses import dataclass

from pagecore.errors import UnsupportedOption
from pagecore.storage.checks import require_int
from pagecore.storage.specs.attention_spec import AttentionSpec
from pagecore.storage.specs.sealing import is_sealed_format
from pagecore.storage.specs.spec import Spec


@dataclass(frozen=True)
class CrossSpec(AttentionSpec):
    """The stored planes and the attention options of one cross-attention layer (Whisper, T5, BART).

    Keys and values are those of an encoder's output. The number of encoder tokens of a sequence is set once and never
    grows; every query sees all of them. Sequences with one encoder output share its blocks.

    Parameters
    ----------
    num_kv_heads, head_dim, v_head_dim, dtype, num_query_heads, scale, softcap, sinks, format, value_format, key_scale,
    value_scale, key_rotation, value_rotation :
        As for `AttentionSpec`.
    max_tokens : int, optional
        Most encoder tokens of a sequence, such as 1500 for Whisper; by default those that the pool holds. It bounds the
        block tables, and `pagecore plan` counts its blocks for every request. `StaticKVCache` needs it.

    Raises
    ------
    ShapeError, UnsupportedDtype, UnsupportedOption
        As `AttentionSpec`; UnsupportedOption also for a window, chunk, sink_tokens, lookahead, key_bounds or
        label_channels.
    """

    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("window", "chunk", "label_channels"):
            if getattr(self, name) is not None:
                raise UnsupportedOption(f"{name} is given, but cross attention sees all encoder tokens; leave it out")
        for name in ("sink_tokens", "lookahead", "key_bounds"):
            given = getattr(self, name)
            if given is not False and not (isinstance(given, int) and given == 0):
                raise UnsupportedOption(f"{name} is given, but cross attention sees all encoder tokens; leave it out")
        for name in ("format", "value_format"):
            if is_sealed_format(getattr(self, name)):
                raise UnsupportedOption(
                    f"{name} is {getattr(self, name)!r}, which seals tokens as newer ones follow, but an encoder's "
                    "output never grows; use another format, such as 'int4_token'"
                )
        super().__post_init__()
        if self.max_tokens is not None:
            object.__setattr__(self, "max_tokens", require_int("max_tokens", self.max_tokens))


def is_cross(spec: Spec) -> bool:
    """Return True for the spec of a cross-attention layer."""
    return isinstance(spec, CrossSpec)
