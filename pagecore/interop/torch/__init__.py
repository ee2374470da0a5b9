"""The operators as torch's own, in `torch.ops.pagecore`: for eager code, `torch.compile` and `torch.export`.

Importing this module registers them, without compiling anything against torch:

    write_kv, plan_attention, paged_attention, paged_attention_lse, paged_attention_out, merge_attention, copy_blocks

The functions here have the arguments of `pagecore.write_kv` and its kin, and call those operators. `as_torch` shows a
pool's planes, a batch's arrays, or any `pagecore.Tensor`, as torch tensors over the same memory. The operators have no
gradients. On CUDA they run on torch's current stream.
"""

from pagecore.interop.torch.attention import merge_attention, paged_attention, plan_attention
from pagecore.interop.torch.conversion import as_torch
from pagecore.interop.torch.writes import copy_blocks, write_kv

__all__ = ["as_torch", "copy_blocks", "merge_attention", "paged_attention", "plan_attention", "write_kv"]
