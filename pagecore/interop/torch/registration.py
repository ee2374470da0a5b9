"""Schemas of the operators, and their registration as `torch.ops.pagecore`."""

from __future__ import annotations

import torch

from pagecore.interop.torch.fakes import FAKES
from pagecore.interop.torch.kernels import KERNELS

_ATTENTION = (
    "Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_table, Tensor seq_lens, {out}*, "
    "Tensor? rows=None, Tensor? cu_query_lens=None, float? scale=None, bool causal=True, SymInt window_left=-1, "
    "SymInt window_right=-1, float softcap=0.0, Tensor? sinks=None, Tensor? alibi_slopes=None, Tensor? mask=None, "
    "Tensor? key_scale=None, Tensor? value_scale=None, Tensor? plan=None, float key_global_scale=1.0, "
    "float value_global_scale=1.0, Tensor? blocks=None, Tensor? block_counts=None, Tensor? indices=None, "
    "Tensor? index_counts=None, int? chunk=None, int sink_tokens=0, Tensor? tree_mask=None, "
    "Tensor? positions=None, Tensor? sealed_key=None, Tensor? sealed_value=None, Tensor? sealed_key_scale=None, "
    "Tensor? sealed_value_scale=None, Tensor? sealed_block_table=None, Tensor? sealed_lens=None, "
    "Tensor? query_scale=None, Tensor? output_scale=None"
)
_PLAN = (
    "Tensor? cu_query_lens, Tensor seq_lens, *, SymInt num_tokens, int num_query_heads, int num_kv_heads, "
    "bool causal=True, SymInt window_left=-1, SymInt window_right=-1, int? chunk=None, int sink_tokens=0, "
    "bool tree=False"
)
_WRITE = (
    "Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, *, "
    "Tensor? key_scale=None, Tensor? value_scale=None, Tensor(c!)? key_scale_cache=None, "
    "Tensor(d!)? value_scale_cache=None, float key_global_scale=1.0, float value_global_scale=1.0, str? format=None, "
    "Tensor(e!)? key_min=None, Tensor(f!)? key_max=None, Tensor(g!)? label=None, Tensor? label_channels=None"
)
_SEAL = (
    "Tensor key_cache, Tensor value_cache, Tensor(a!) sealed_key, Tensor(b!) sealed_value, "
    "Tensor(c!) sealed_key_scale, Tensor(d!) sealed_value_scale, Tensor pairs"
)
_UNSEAL = (
    "Tensor sealed_key, Tensor sealed_value, Tensor sealed_key_scale, Tensor sealed_value_scale, "
    "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor pairs"
)
_SCHEMAS = {
    "write_kv": f"({_WRITE}) -> ()",
    "plan_attention": f"({_PLAN}) -> Tensor",
    "paged_attention": f"({_ATTENTION.format(out='')}) -> Tensor",
    "paged_attention_lse": f"({_ATTENTION.format(out='')}) -> (Tensor, Tensor)",
    "paged_attention_out": f"({_ATTENTION.format(out='Tensor(a!) out, ')}) -> ()",
    "merge_attention": (
        "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, *, Tensor? mask=None) -> (Tensor, Tensor)"
    ),
    "merge_attention_parts": "(Tensor outs, Tensor lses, Tensor? cu_parts=None) -> (Tensor, Tensor)",
    "hadamard": "(Tensor x) -> Tensor",
    "seal_kv": f"({_SEAL}) -> ()",
    "unseal_kv": f"({_UNSEAL}) -> ()",
    "copy_blocks": "(Tensor(a!)[] caches, Tensor pairs, *, bool independent=False) -> ()",
}
# Sparse tensors reach the kernels, too: pagecore's error names the argument, torch's error would list its backends.
_DISPATCH_KEYS = ("CPU", "CUDA", "SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA")
# Makes Inductor pass caches with their own strides; a contiguous copy would be as large as the cache.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def _register() -> torch.library.Library:
    library = torch.library.Library("pagecore", "DEF")
    for name, schema in _SCHEMAS.items():
        library.define(name + schema, tags=_TAGS)
        for key in _DISPATCH_KEYS:
            library.impl(name, KERNELS[name], key)
        torch.library.register_fake(f"pagecore::{name}", FAKES[name], lib=library)
    return library


# torch drops the registration together with this object.
_library = _register()
write_kv = torch.ops.pagecore.write_kv.default
plan_attention = torch.ops.pagecore.plan_attention.default
paged_attention = torch.ops.pagecore.paged_attention.default
paged_attention_lse = torch.ops.pagecore.paged_attention_lse.default
paged_attention_out = torch.ops.pagecore.paged_attention_out.default
merge_attention = torch.ops.pagecore.merge_attention.default
merge_attention_parts = torch.ops.pagecore.merge_attention_parts.default
hadamard = torch.ops.pagecore.hadamard.default
seal_kv = torch.ops.pagecore.seal_kv.default
unseal_kv = torch.ops.pagecore.unseal_kv.default
copy_blocks = torch.ops.pagecore.copy_blocks.default
