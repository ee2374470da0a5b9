"""Formats of compressed-tensors: groups of modules, each with a format.

Source: the quantisation config of compressed-tensors, and its readers in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

from pagecore.models.config_files.fields import Fields
from pagecore.models.parameters.weights.excluded_modules import names_module
from pagecore.models.parameters.weights.formats import WeightFormat, float8, grouped
from pagecore.models.parameters.weights.reading import group_size, integers, refuse

__all__ = ["read_compressed_tensors"]

# The class of all matrices, and that of vLLM for all experts of a layer.
_ALL, _EXPERTS = "Linear", "FusedMoE"


def read_compressed_tensors(fields: Fields) -> WeightFormat:
    """Return the format of the group of all matrices, and of single modules the formats of their groups.

    Names decide before classes, as in vLLM.
    """
    _refuse_sparse(fields)
    groups = fields.given("config_groups")
    everywhere: WeightFormat | None = None
    experts: WeightFormat | None = None
    modules: dict[str, WeightFormat] = {}
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping):  # activations, or keys and values
            continue
        found = _of_group(Fields(weights, fields.source, fields.name(f"config_groups.{name}.weights")), group, fields)
        for target in _targets(Fields(group, fields.source, fields.name(f"config_groups.{name}"))):
            if target == _ALL:
                everywhere = everywhere or found
            elif target == _EXPERTS:
                experts = experts or found
            else:
                modules.setdefault(target, found)
    if everywhere is None:
        if experts is not None:
            modules["experts"] = experts
        if not modules:
            return refuse(fields, "config_groups")
        return replace(next(iter(modules.values())), modules=tuple(modules.items()), is_modules_only=True)
    return replace(everywhere, modules=tuple(modules.items()), experts=experts, head_bits=_head(fields, everywhere))


def _refuse_sparse(fields: Fields) -> None:
    """Refuse matrices that are stored sparse, or as they were before they were quantised."""
    if fields.given("format") in ("dense", "marlin-24") or "sparse" in str(fields.given("format")):
        refuse(fields, "format")
    sparsity = fields.given("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense"):
        refuse(fields, "sparsity_config")


def _targets(group: Fields) -> list[str]:
    """Return the targets of a group: names, regular expressions after "re:", and classes of modules."""
    listed = group.given("targets")
    if listed is None:
        return [_ALL]
    is_known = isinstance(listed, list | tuple) and all(isinstance(each, str) and each for each in listed)
    if not is_known or any(each[0].isupper() and each not in (_ALL, _EXPERTS) for each in listed):
        refuse(group, "targets")
    return list(listed)


def _of_group(weights: Fields, group: Mapping[str, object], whole: Fields) -> WeightFormat:
    kind, bits, size = weights.given("type"), weights.given("num_bits"), group_size(weights.given("group_size"))
    if group.get("format") == "dense":
        return refuse(whole, "config_groups")
    if kind == "float" and bits == 4:
        return grouped("nvfp4", 4, 16, 8, matrix_bits=64) if size == 16 else grouped("mxfp4", 4, 32, 8)
    if kind == "float" and bits == 8 and size:
        return grouped("mxfp8", 8, 32, 8) if size == 32 else grouped("fp8", 8, size, 16)
    if kind == "float" and bits == 8:
        block = weights.given("block_structure") if weights.given("strategy") == "block" else None
        return float8(block, 16, is_by_row=weights.given("strategy") == "channel")
    if kind not in (None, "int"):
        return refuse(weights, "type")
    found = integers(weights, "num_bits", size, has_zeros=weights.given("symmetric") is False)
    # The group of each input, if groups are those of inputs in another order.
    return replace(found, input_bits=32) if weights.given("actorder") in ("group", True) else found


def _head(fields: Fields, everywhere: WeightFormat) -> int | Fraction:
    """Return the bits of an output head, which is a matrix like the others unless the config leaves it out; else 0."""
    listed = fields.given("ignore")
    names = listed if isinstance(listed, list | tuple) else ()
    is_left = any(isinstance(name, str) and names_module(name, "lm_head") for name in names)
    return 0 if is_left else everywhere.bits
