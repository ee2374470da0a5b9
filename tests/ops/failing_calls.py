"""Operators and their plans for tests in which memory runs out: a call that fails writes nothing."""

import numpy as np

from pagecore import (
    available_isas,
    copy_blocks,
    gather_blocks,
    isa,
    latent_attention,
    merge_attention,
    move_slots,
    paged_attention,
    plan_attention,
    select,
    select_topk,
    set_isa,
    transfer_blocks,
    write_kv,
)
from tests.failing_calls import Case

HEADS = {"num_query_heads": 4, "num_kv_heads": 2}


class Arrays:
    """Caches of a batch, and arrays that calls write to."""

    def __init__(self):
        random = np.random.default_rng(3)
        self.query = random.standard_normal((300, 4, 64)).astype(np.float32)
        self.caches = [random.standard_normal((40, 16, 2, 64)).astype(np.float32) for _ in range(2)]
        self.table = random.permutation(40)[:36].reshape(3, 12).astype(np.int32)
        self.starts, self.lens = np.array([0, 120, 200, 300], np.int32), np.array([150, 90, 170], np.int32)
        self.plan = plan_attention(self.starts, self.lens, **HEADS)
        self.out, self.lse = np.full_like(self.query, 7), np.full((300, 4), 7, np.float32)
        self.codes, self.scales = np.zeros((40, 16, 2, 64), np.int8), np.zeros((40, 16, 2, 1), np.float32)
        self.copied = np.zeros((40, 16, 2, 64), np.float16)
        self.latent_plan = plan_attention(None, [90, 640, 600], num_query_heads=4, num_kv_heads=1, num_workers=8)
        self.slots = random.permutation(640)[:300]
        self.pairs = np.stack([np.arange(20), np.arange(20, 40)], 1)

    def attend(self, plan=None):
        paged_attention(
            self.query,
            *self.caches,
            self.table,
            self.lens,
            cu_query_lens=self.starts,
            plan=plan,
            out=self.out,
            return_lse=True,
        )

    def attend_to_latents(self, lens, plan=None):
        """Attend from a token of each sequence to rows of 96 numbers, of which 64 are the latent."""
        latents = self.caches[0].reshape(-1, 16, 128)[..., :96]
        table = np.arange(len(lens) * 40).reshape(len(lens), 40) % 40
        query, rope = self.query[: len(lens)], self.query[-len(lens) :, :, :32]
        out = self.out[: len(lens)] if plan is not None else None
        latent_attention(query, rope, latents, None, table, lens, scale=0.1, out=out, plan=plan)

    def signature(self):
        plan = self.plan
        items = (plan.num_sequences, plan.num_partial_rows, plan.window, bytes(np.ascontiguousarray(plan.items)))
        written = (*self.caches, self.out, self.lse, self.codes, self.scales, self.copied)
        return items, [array.tobytes() for array in written]


class InstructionSet:
    """The instruction set in use, and another one if the machine has two."""

    def __init__(self):
        self.used = isa()
        self.other = next((name for name in available_isas() if name != self.used), self.used)

    def signature(self):
        """Return the instruction set in use, and use the first one again."""
        now = isa()
        set_isa(self.used)
        return now


class OtherInstructionSet(InstructionSet):
    """Another instruction set than the one of the process, in use."""

    def __init__(self):
        super().__init__()
        set_isa(self.other)


ARRAY_CALLS = {
    "plan_attention": lambda state: plan_attention(state.starts, state.lens, window=40, **HEADS),
    "plan_attention into a plan": lambda state: plan_attention(
        state.starts[:3], state.lens[:2] + 300, window=(40, 0), out=state.plan, **HEADS
    ),
    "plan_attention into a plan that grows": lambda state: plan_attention(
        None, [3000] * 4, num_workers=64, out=state.plan, **HEADS
    ),
    "paged_attention": lambda state: state.attend(),
    "paged_attention with a plan": lambda state: state.attend(state.plan),
    "write_kv": lambda state: write_kv(state.query[:, :2], state.query[:, 2:], *state.caches, state.slots),
    "copy_blocks": lambda state: copy_blocks(state.caches, state.pairs),
    "transfer_blocks with a conversion": lambda state: transfer_blocks(
        state.caches, [state.codes, state.copied], state.pairs, target_scales=[state.scales, None], null_block=False
    ),
    "move_slots": lambda state: move_slots(state.caches, state.slots[:100], state.slots[100:200]),
    "gather_blocks": lambda state: gather_blocks(state.caches[0], state.table, state.lens),
    "merge_attention": lambda state: merge_attention(
        state.query, state.lse, state.query, state.lse, out=state.out, lse=state.lse
    ),
    "select": lambda state: select(state.query[:, 0], 20, lens=64),
    "select_topk": lambda state: select_topk(state.query[:, 0], 20),
}
# These make arrays for their results after the work is done.
RETURNS = ("paged_attention", "paged_attention with a plan")
# Cases in which a sample of the allocations could miss those next to the first write.
EVERY = ("plan_attention into a plan that grows", "transfer_blocks with a conversion", "select")
CASES = {
    name: Case(Arrays, call, may_be_done=name in RETURNS, every=name in EVERY) for name, call in ARRAY_CALLS.items()
}
CASES["latent_attention with a larger plan"] = Case(
    Arrays,
    lambda state: state.attend_to_latents([90, 640, 600], state.latent_plan),
    smaller=lambda state: state.attend_to_latents([90]),
    every=True,
)
CASES["set_isa"] = Case(InstructionSet, lambda state: set_isa(state.other))
CASES["set_isa to the default"] = Case(OtherInstructionSet, lambda state: set_isa(None))
