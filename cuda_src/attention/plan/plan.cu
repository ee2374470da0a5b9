// Plan of a batch whose lengths are only on the device. The plan is identical to the plan that the host would write.
//
// One CTA. In each step a thread takes one sequence, tile, border or item of every PC_PLAN_THREADS; prefix sums over
// the block (block_sums.cuh) give the position of its result. No thread loops over the borders or items of a tile, so
// that a plan of one long sequence for hundreds of workers takes no longer than others.
//
//   one thread for each   computes                                          writes
//   sequence              tiles of both sections, entries of the mask       tile_starts, mask_starts
//   tile                  its sequence, by binary search; keys and cost     tiles, tile_costs
//   border                its tile, by binary search; the key of the cut    borders, first_item
//   tile                  number of pieces, first item and partial row      tiles
//   item                  its tile, by binary search; keys between cuts     items
//
// Tiles are cut at the borders of equal shares. A batch-invariant plan cuts tiles at every kFoldTokens, and moves
// borders to these cuts. 64-bit divisions: one for each border, two for each tile. The lengths of a sequence are read
// once, and once for each of its tiles. Invalid lengths are clamped as in the attention kernels. If cu_query_lens
// decreases, tiles can overlap; tiles for which the buffer has no room are skipped.

#include "cuda_src/abi/plan.h"
#include "cuda_src/attention/inputs/batch.cuh"
#include "cuda_src/attention/plan/section.cuh"
#include "cuda_src/device/block_sums.cuh"

namespace pagecore {

// Number of tiles of each section.
struct NumTiles {
  pc_int64 of[PC_NUM_SECTIONS];
};

// Writes the first tile and the first mask entry of each sequence.
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
    // This scan has barriers after the stores above, so that any thread may read tile_starts afterwards.
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
