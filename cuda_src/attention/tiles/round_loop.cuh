// The main loop of decode.cu and general.cu.
//
// A CTA processes its items in rounds (tile_walk.cuh). Each warp has a ring of kStages tiles in shared memory. At the
// top of a pass every stage is in flight, and `stage` is the oldest:
//
//   pass     fill      the ring refills the stage that the last pass used; its tile can belong to a later item
//            open      at the start of an item: join the parts of the item before, load queries
//            attend    wait for the stage; scores, softmax, accumulate
//            store     after the last round of an item: exchange the sums of the warps, write the rows
//
// A Worker has the phases:
//
//   open(p, rows, item, stage, split)    return the rounds of the item; an item without rounds is complete, and its
//                                        rows have been written. Set `split` if join() must follow the item
//   attend(p, ring, rows, stage)         process the oldest tile
//   store(p, rows, item, stage, rounds)  write the rows if no `rounds` are left, or if a piece has ended
//   join(p, item)                        join the parts of a tile if this CTA is the last to write one
//
// Worker::kJoinsAll: join() follows every item, and open() leaves `split` alone. The ring and the rows are arguments,
// and `split` is a variable of the loop: as members of the worker they cost up to 6 registers.
#pragma once

#include "cuda_src/attention/tiles/tile_walk.cuh"

namespace pagecore {

template <typename Worker, typename Ring, typename Rows>
PC_DEVICE void run_rounds(const PcAttentionParams& p, const WorkRange& work, Worker& worker, Ring& ring, Rows& rows) {
  int item = work.first - 1, rounds = 0;
  bool split = false;
  int stage = 0, num_free = Worker::kStages;  // stages to refill, from `stage` on
  while (true) {
    for (; num_free > 0; --num_free) {
      ring.fill(p, stage);
      stage = stage == Worker::kStages - 1 ? 0 : stage + 1;
    }
    if (rounds == 0) {
      if (Worker::kJoinsAll ? item >= work.first : split) worker.join(p, item);
      split = false;
      if (++item >= work.end) return;
      rounds = worker.open(p, rows, item, stage, split);
      if (rounds == 0) continue;
    }
    worker.attend(p, ring, rows, stage);
    num_free = 1;  // fault: stage_of_another_round
    --rounds;
    worker.store(p, rows, item, stage, rounds);
  }
}

}  // namespace pagecore
