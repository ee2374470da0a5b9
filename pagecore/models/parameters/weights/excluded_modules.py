"""Modules that a quantised checkpoint leaves unquantised, from its `quantization_config`."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Mapping

from pagecore.models.config_files.fields import Fields
from pagecore.models.config_files.quantization import parts_of

__all__ = ["bits_of_modules", "names_module", "unquantised_modules"]

# Fields of fine-grained FP8, AWQ, MXFP4 and bitsandbytes, of compressed-tensors, ModelOpt, Quark, HQQ and AQLM.
_FIELDS = (
    *("modules_to_not_convert", "llm_int8_skip_modules", "ignored_layers", "ignore", "exclude_modules"),
    *("exclude", "skip_modules", "linear_weights_not_to_quantize"),
)
# Names that precede "layers" in checkpoints, other than "model.".
_PREFIX = re.compile(r"^.*?(?=\blayers\b)")
_SPECIAL = re.compile(r"[*+?^$()\[\]{}|\\]")
_EXPERT = re.compile(r"\bexperts\.0\.")


def unquantised_modules(fields: Fields) -> tuple[str, ...]:
    """Return the patterns of the modules that a `quantization_config` excludes."""
    found: list[str] = []
    for part in parts_of(fields):
        for name in _FIELDS:
            listed = part.given(name)
            names = [each for each in listed if isinstance(each, str)] if isinstance(listed, list | tuple) else []
            found += [each if each.startswith("re:") else each.removesuffix(".weight") for each in names]
        rules = part.given("dynamic")
        # GPTQModel: a rule that begins with "-:" excludes modules by a regular expression.
        found += [f"re:{rule[2:]}" for rule in rules if rule.startswith("-:")] if isinstance(rules, Mapping) else []
        found += [_as_pattern(name) for name, bits in bits_of_modules(part).items() if bits >= 16]
    return tuple(dict.fromkeys(found))


def bits_of_modules(fields: Fields) -> dict[str, int]:
    """Return the bits that AutoRound gives to single modules, by name or regular expression."""
    given = fields.given("extra_config")
    modules = given.items() if isinstance(given, Mapping) else ()
    bits = {name: module.get("bits") for name, module in modules if isinstance(module, Mapping)}
    return {name: number for name, number in bits.items() if isinstance(number, int)}


def _as_pattern(name: str) -> str:
    """Return a key of `extra_config` as a pattern: one with special characters is searched for in names."""
    return f"re:.*(?:{name})" if _SPECIAL.search(name) else name


def names_module(pattern: str, name: str) -> bool:
    """Return True if a pattern names a module, or a module that it is in.

    Parameters
    ----------
    pattern : str
        A name or a part of it ("self_attn", "model.layers.0"), a glob, or a regular expression after "re:".
    name : str
        Name of a module such as "model.layers.0.mlp.experts.0.gate_proj".
    """
    if pattern.startswith("re:"):
        try:
            return (
                re.match(pattern[3:], name) is not None
                or re.match(pattern[3:], _EXPERT.sub("experts.1.", name)) is not None
            )
        except re.error:
            return False
    short, wanted = _without_prefix(name), _without_prefix(pattern)
    if any(sign in wanted for sign in "*?["):
        # A glob may end at a module around this one.
        return any(fnmatch.fnmatchcase(short, each) for each in (wanted, f"*{wanted}", f"{wanted}.*", f"*.{wanted}.*"))
    return f".{wanted}." in f".{short}."


@functools.lru_cache(maxsize=4096)
def _without_prefix(name: str) -> str:
    return _PREFIX.sub("", name)
