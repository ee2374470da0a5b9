// The plan of a batch whose lengths are known on the device alone: the sections and the layout that the host writes
// too.
//
// One CTA. Its threads take sequences, tiles, borders of shares and items in rounds, one each; sums over the block give
// what precedes a thread's own. No thread loops over borders or items of a tile, so that a plan for one long sequence
// and hundreds of workers takes no longer than others.
//
//   sequences   tiles of both sections, entries of the mask            -> tile_starts, mask_starts
//   tiles       its sequence, by a search; its keys and cost           -> tiles, tile_costs
//   borders     its tile, by a search; the key that it cuts at         -> borders, first_item
//   tiles       how many pieces, its first item and partial row        -> tiles
//   items       its tile, by a search; the keys between two cuts       -> items
//
// Tiles are cut at the borders of equal shares, a batch-invariant plan at every kFoldTokens with the borders between
// pieces. Division of 64 bits: one for each border, two for each tile. Each sequence's lengths are read once, and once
// more for each of its tiles. Lengths that make no sense are cut as the attention kernels cut them; cu_query_lens that
// falls can make tiles overlap, and those that the buffer has no room for are left out.

#include "abi_plan.h"
#include "attention_batch.cuh"
#include "block_sums.cuh"
#include "plan_section.cuh"

namespace pagecore {

// Tiles of each section.
struct NumTiles {
  pc_int64 of[PC_NUM_SECTIONS];
};

// Where each sequence's tiles and its part of the mask begin.
PC_DEVICE NumTiles place_sequences(const PcPlanParams& params, const BlockScan<PC_PLAN_THREADS>& block) {
  const Global<pc_int64> mask_starts(params.buffer + params.layout.mask_starts);
  const Global<pc_int32> tile_starts(params.buffer + params.layout.tile_starts);
  const int n = params.attention.num_sequences;
  NumTiles tiles = {};
  pc_int64 entries = 0;
  for (int base = 0; base < n; base += PC_PLAN_THREADS) {
    const int i = base + pc_thread();
    int queries = 0, length = 0;
    if (i < n) {
      const Sequence sequence = load_sequence(params.attention, i);
      queries = max_of(sequence.queries_end - sequence.queries_begin, 0);
      length = sequence.length;
    }
    const bool few = static_cast<pc_int64>(queries) * params.layout.group <= kDecodeRows;
    const int own_section = few && params.layout.batch_invariant == 0 ? PC_DECODE : PC_PROMPTS;
    PC_UNROLL
    for (int id = 0; id < PC_NUM_SECTIONS; ++id) {
      pc_int64 all;
      const int own = id == own_section ? ceil_div(queries, params.layout.sections[id].query_tile) : 0;
      const pc_int64 before = tiles.of[id] + block.exclusive_sum(own, all);
      if (i < n)
        tile_starts.store(static_cast<pc_int64>(id) * params.layout.max_sequences + i, clamp(before, 0, 0x7fffffff));
      tiles.of[id] += all;
    }
    // After this sum, whose barriers follow the stores above, any thread may read tile_starts.
    pc_int64 all;
    const pc_int64 before = entries + block.exclusive_sum(static_cast<pc_int64>(queries) * length, all);
    if (i < n) mask_starts.store(i, before);
    entries += all;
  }
  return tiles;
}

PC_KERNEL(PC_PLAN_THREADS, 1) void plan(const PcPlanParams params) {
  const BlockScan<PC_PLAN_THREADS> block(pc_shared_buffer().as<pc_int64>());
  const NumTiles tiles = place_sequences(params, block);
  PlanSection decode(params, block, PC_DECODE), prompts(params, block, PC_PROMPTS);
  decode.run(0, tiles.of[PC_DECODE]);
  prompts.run(decode.num_items(), tiles.of[PC_PROMPTS]);
  if (pc_thread() != 0) return;
  const Global<pc_int32> head(params.buffer);
  const int words[8] = {params.attention.num_sequences,
                        decode.num_items(),
                        prompts.num_items(),
                        decode.num_partial_rows(),
                        prompts.num_partial_rows(),
                        0,
                        0,
                        0};
  PC_UNROLL
  for (int k = 0; k < 8; ++k) head.store(k, words[k]);
}

}  // namespace pagecore
