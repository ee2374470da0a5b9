// Scatter of changed block table entries from a staging buffer into the tables on the device.
//
// One thread for each entry, in steps of the grid. An entry is read once, as one 16-byte vector, and its block is
// written once. Entries outside the table are skipped.
#include "cuda_src/abi/moves.h"
#include "cuda_src/device/primitives.cuh"

namespace pagecore {

PC_KERNEL(128, 1) void scatter_entries(const PcTableParams params) {
  const Global<PcTableEntry> entries(params.entries);
  const Global<int> table(params.table);
  const int given = Global<int>(params.count).load(0), count = given < params.capacity ? given : params.capacity;
  const int step = pc_num_blocks_x() * pc_num_threads();
  for (int i = pc_block_x() * pc_num_threads() + pc_thread(); i < count; i += step) {
    const pc_vector entry = entries.load_vector(i);
    const pc_int64 index = static_cast<pc_int64>(static_cast<pc_uint64>(entry.word[1]) << 32 | entry.word[0]);
    if (index >= 0 && index < params.size) table.store(index, static_cast<int>(entry.word[2]));
  }
}

}  // namespace pagecore
