// Summaries of new keys: bounds of blocks and labels of tokens, after the write of the keys themselves.
//
//   slots of a call   | 5.3 | 5.4 | 5.5 | 8.0 | 8.1 | -1 | 2.7 | ...       block.offset
//   block of threads     ^                 ^                 ^
//
// A block of threads has one token. It stores the label of the token. If the token is the first of its block in the
// call, or the last that has the first slot of its block, it also has the bounds of that block: it lists the tokens of
// the block in the order of the call, PC_SUMMARY_THREADS slots at a time, and each thread folds its elements of their
// keys into the bounds. So one thread writes an element of the bounds, in the order of the tokens, and no atomics are
// needed. Tokens may share a slot, so that the number of slots of a block says nothing of its tokens.
//
// Bytes: keys are read once for the bounds, bounds are read and written once for each block. The owner of a block reads
// all slots of the call once, and those up to the last token of the block again.
#include "cuda_src/abi/sparse.h"
#include "cuda_src/device/floats.cuh"
#include "cuda_src/device/write_slots.cuh"

namespace pagecore {

// The shared memory of a block of threads.
struct SummaryShared {
  PC_MEMBER explicit SummaryShared(const Shared<pc_uint8>& buffer)
      : tokens(buffer.as<int>()), counts(buffer.as<int>() + PC_SUMMARY_THREADS) {}

  Shared<int> tokens;  // [PC_SUMMARY_THREADS]: tokens of the block in a stretch of the slots
  Shared<int> counts;  // of each warp
};

struct SummarySlot {
  bool exists;
  SlotPosition at;
};

PC_DEVICE SummarySlot slot_at(const PcSummaryParams& p, int token) {
  const pc_int64 slot = load_index(p.slots, token);
  if (static_cast<pc_uint64>(slot) >= static_cast<pc_uint64>(p.num_slots)) return {false, {-1, 0}};
  return {true, position_of(slot, p.block_size, p.block_shift)};
}

PC_DEVICE pc_int64 cache_offset(const PcCache& cache, const SlotPosition& at, int head) {
  return at.block * cache.block_stride + at.offset * cache.token_stride + head * cache.head_stride;
}

// An element of the key of a token.
PC_DEVICE float load_key(const PcSummaryParams& p, int token, int head, int d) {
  if (p.key.data != 0) {
    return load_float(p.key_type, p.key.data, token * p.key.token_stride + head * p.key.head_stride + d);
  }
  return load_float(p.key_type, p.stored.data, cache_offset(p.stored, slot_at(p, token).at, head) + d);
}

PC_DEVICE void store_label(const PcSummaryParams& p, int token, const SlotPosition& at) {
  const Global<int> channels(p.channels);
  const int count = p.num_heads * p.num_channels.divisor;
  for (int i = pc_thread(); i < count; i += pc_num_threads()) {
    const int head = divide(i, p.num_channels), channel = clamp(channels.load(i), 0, p.dim.divisor - 1);
    const int s = i - head * p.num_channels.divisor;
    store_float(p.label_type, p.label.data, cache_offset(p.label, at, head) + s, load_key(p, token, head, channel));
  }
}

// Returns the last token of the block in the call if `token`, which is at `at`, has the bounds of the block; -1 if
// another token has them: an earlier one, or one with the first slot of the block, of these the last.
PC_DEVICE int last_if_owned(const PcSummaryParams& p, const SummaryShared& shared, int token, const SlotPosition& at) {
  constexpr int kOther = 0x7fffffff;
  const bool starts = at.offset == 0;
  if (!starts && token > 0 && slot_at(p, token - 1).at.block == at.block) return -1;
  int last = token;
  for (int i = pc_thread(); i < p.slots.size; i += pc_num_threads()) {
    const SlotPosition other = slot_at(p, i).at;
    if (other.block != at.block) continue;
    const bool first = other.offset == 0 && i != token;
    last = max_of(last, (starts ? first && i > token : first || i < token) ? kOther : i);
  }
  PC_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) last = max_of(last, pc_shuffle_xor(last, mask));
  if (pc_lane() == 0) shared.counts.store(pc_warp(), last);
  pc_sync_block();  // fault: summary_barrier_after_votes
  for (int w = 0; w < PC_SUMMARY_THREADS / 32; ++w) last = max_of(last, shared.counts.load(w));
  pc_sync_block();  // fault: summary_barrier_before_counts
  return last == kOther ? -1 : last;
}

// Lists the tokens of the block among tokens first .. first + PC_SUMMARY_THREADS - 1, in order; returns their number.
PC_DEVICE int list_tokens(const PcSummaryParams& p, const SummaryShared& shared, int first, pc_int64 block) {
  const int token = first + pc_thread();
  const bool listed = token < p.slots.size && slot_at(p, token).at.block == block;
  const pc_uint32 lanes = pc_ballot(listed);
  if (pc_lane() == 0) shared.counts.store(pc_warp(), pc_count_bits(lanes));
  pc_sync_block();  // fault: summary_barrier_after_counts
  int before = 0, total = 0;
  for (int w = 0; w < PC_SUMMARY_THREADS / 32; ++w) {
    if (w == pc_warp()) before = total;
    total += shared.counts.load(w);
  }
  if (listed) shared.tokens.store(before + pc_count_bits(lanes & ((1u << pc_lane()) - 1)), token);
  pc_sync_block();  // fault: summary_barrier_after_tokens
  return total;
}

// Folds the keys of `count` listed tokens into the bounds of the block. `starts`: the first of them starts the bounds.
PC_DEVICE void fold_tokens(const PcSummaryParams& p, const SummaryShared& shared, pc_int64 block, int count,
                           bool starts) {
  constexpr int kInFlight = 4;
  const int elements = p.num_heads * p.dim.divisor;
  for (int i = pc_thread(); i < elements; i += pc_num_threads()) {
    const int head = divide(i, p.dim), d = i - head * p.dim.divisor;
    const pc_int64 low = cache_offset(p.low, {block, 0}, head) + d, high = cache_offset(p.high, {block, 0}, head) + d;
    float least = 0.0f, most = 0.0f;
    if (!starts) {
      least = load_float(p.bound_type, p.low.data, low);
      most = load_float(p.bound_type, p.high.data, high);
    }
    PC_NO_UNROLL
    for (int first = 0; first < count; first += kInFlight) {
      float keys[kInFlight];
      PC_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        keys[k] = first + k < count ? load_key(p, shared.tokens.load(first + k), head, d) : 0.0f;
      }
      if (starts && first == 0) least = most = keys[0];
      PC_UNROLL
      for (int k = 0; k < kInFlight; ++k) {
        if (first + k >= count) break;
        least = keys[k] < least ? keys[k] : least;
        most = keys[k] > most ? keys[k] : most;
      }
    }
    store_float(p.bound_type, p.low.data, low, least);
    store_float(p.bound_type, p.high.data, high, most);
  }
}

PC_KERNEL(PC_SUMMARY_THREADS, 8) void summarise(const PcSummaryParams p) {
  const int token = pc_block_x();
  const SummaryShared shared(pc_shared_buffer());
  const SummarySlot slot = slot_at(p, token);
  if (!slot.exists) return;
  if (p.label.data != 0) store_label(p, token, slot.at);
  if (p.low.data == 0) return;
  const int last = last_if_owned(p, shared, token, slot.at);
  for (int first = token; first <= last; first += pc_num_threads()) {
    const int count = list_tokens(p, shared, first, slot.at.block);
    if (count > 0) fold_tokens(p, shared, slot.at.block, count, slot.at.offset == 0 && first == token);
  }
}

}  // namespace pagecore
