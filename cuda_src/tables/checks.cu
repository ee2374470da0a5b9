// Validation of index arrays in device memory, for `pagecore.debug`: the smallest index of an invalid entry.
//
// check_ids has one thread for each id. check_batch has one block of threads for each sequence, whose threads divide
// the entries of its row, and one block that adds up the lengths. Results are combined by an atomic minimum. Every
// entry is read once; a length and a row index are read by all threads of their block.
#include "cuda_src/abi/checks.h"
#include "cuda_src/device/block_sums.cuh"
#include "cuda_src/device/primitives.cuh"
#include "cuda_src/device/units.cuh"

namespace pagecore {

constexpr pc_int64 kMaxLength = 0x7fffffff;

PC_KERNEL(128, 1) void check_ids(const PcIdParams params) {
  const int i = pc_block_x() * pc_num_threads() + pc_thread();
  if (i >= params.ids.size) return;
  const pc_int64 id = load_index(params.ids, i);
  if (id >= params.lowest && id < params.limit) return;
  Global<pc_uint64>(params.offender).atomic_min(0, static_cast<pc_uint64>(i));
}

PC_DEVICE bool has_valid_lengths(const PcBatchParams& params, int sequence) {
  const pc_int64 length = load_index(params.seq_lens, sequence);
  if (length < 0 || length > kMaxLength) return false;
  if ((length + params.block_size - 1) / params.block_size > params.table.width) return false;
  const pc_int64 row = params.rows.data != 0 ? load_index(params.rows, sequence) : sequence;
  if (row < 0 || row >= params.table.num_rows) return false;
  if (params.cu_query_lens.data == 0) return true;
  const pc_int64 begin = load_index(params.cu_query_lens, sequence),
                 end = load_index(params.cu_query_lens, sequence + 1);
  return (sequence > 0 || begin == 0) && begin >= 0 && begin <= end && end <= params.num_queries;
}

// Returns true if the blocks that this thread checks are valid. The lengths of the sequence must be valid.
PC_DEVICE bool has_valid_blocks(const PcBatchParams& params, int sequence) {
  const pc_int64 row = params.rows.data != 0 ? load_index(params.rows, sequence) : sequence;
  const pc_int64 begin = row * params.table.row_stride;
  const pc_int64 blocks = (load_index(params.seq_lens, sequence) + params.block_size - 1) / params.block_size;
  for (pc_int64 i = pc_thread(); i < blocks; i += pc_num_threads()) {
    const pc_int64 block = params.table.wide ? Global<pc_int64>(params.table.data).load(begin + i)
                                             : Global<int>(params.table.data).load(begin + i);
    if (block < 0 || block >= params.num_blocks) return false;
  }
  return true;
}

PC_KERNEL(128, 1) void check_batch(const PcBatchParams params) {
  const Global<pc_uint64> offender(params.offender);
  const int sequence = pc_block_x();
  if (sequence < params.seq_lens.size) {
    if (!has_valid_lengths(params, sequence) || !has_valid_blocks(params, sequence)) {
      offender.atomic_min(0, static_cast<pc_uint64>(sequence));
    }
    return;
  }
  // The last block of threads adds up the lengths.
  pc_int64 total = 0;
  for (int i = pc_thread(); i < params.seq_lens.size; i += pc_num_threads()) total += load_index(params.seq_lens, i);
  total = sum_over_block<PC_MOVE_THREADS>(total);
  if (pc_thread() == 0 && params.num_tokens >= 0 && total != params.num_tokens) {
    offender.atomic_min(0, static_cast<pc_uint64>(sequence));
  }
}

}  // namespace pagecore
