"""torch operators (`torch.ops.pagecore`) for eager code, `torch.compile` and `torch.export`.

Importing this module registers them; nothing is compiled against torch:

    write_kv, plan_attention, paged_attention, paged_attention_lse, paged_attention_out, merge_attention,
    merge_attention_parts, hadamard, copy_blocks, seal_kv, unseal_kv

The functions of this module take the same arguments as `pagecore.write_kv`, `pagecore.paged_attention` and so on, and
call those operators. `as_torch` views a `pagecore.Tensor` (a plane of a pool, an array of a batch) as a torch tensor
over the same memory. The operators have no gradients. On CUDA they run on torch's current stream.
"""

from pagecore.interop.torch.attention import (
    merge_attention,
    merge_attention_parts,
    paged_attention,
    plan_attention,
)
from pagecore.interop.torch.conversion import as_torch
from pagecore.interop.torch.rotations import hadamard
from pagecore.interop.torch.writes import copy_blocks, seal_kv, unseal_kv, write_kv

__all__ = [
    "as_torch",
    "copy_blocks",
    "hadamard",
    "merge_attention",
    "merge_attention_parts",
    "paged_attention",
    "plan_attention",
    "seal_kv",
    "unseal_kv",
    "write_kv",
]
