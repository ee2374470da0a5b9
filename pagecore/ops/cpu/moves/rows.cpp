// Slot-mapped writes and merges: checks, and division of the work among threads.
#include <algorithm>
#include <cstddef>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/moves.hpp"
#include "pagecore/ops/cpu/ops.hpp"
#include "pagecore/ops/cpu/threads/cost.hpp"
#include "pagecore/ops/cpu/threads/threads.hpp"

namespace pagecore::cpu {
namespace {

struct SlotSurvey {
  int64_t written = 0;  // tokens with a slot >= 0
  bool is_past_end = false;
};

// Branch-free, so that it vectorises: the sign bits are summed.
template <typename Id>
SlotSurvey survey(const Indices& slots, int64_t limit) {
  uint64_t past_end = 0, written = 0;
  const auto last = static_cast<uint64_t>(limit - 1);
  const auto add = [&](uint64_t slot) {
    past_end |= (last - slot) & ~slot;
    written += ~slot >> 63;
  };
  if (slots.stride == static_cast<int64_t>(sizeof(Id))) {
    const auto* ids = reinterpret_cast<const Id*>(slots.data);
    for (int64_t i = 0; i < slots.size; ++i) add(static_cast<uint64_t>(int64_t{ids[i]}));
  } else {
    for (int64_t i = 0; i < slots.size; ++i) add(static_cast<uint64_t>(slots.at(i)));
  }
  return {static_cast<int64_t>(written), past_end >> 63 != 0};
}

// Bytes that are moved for a token, of which the cache's matter for streaming.
int64_t token_bytes(const Cache& cache) { return cache.num_heads * row_bytes(cache); }
int64_t token_bytes(const TokenArray& rows) { return rows.num_heads * rows.dim * size_of(rows.type); }

TokenArray rows_from(TokenArray rows, int64_t begin, int64_t count) {
  rows.data += begin * rows.token_stride;
  rows.num_tokens = count;
  return rows;
}

Lse lse_from(Lse lse, int64_t begin, int64_t count) {
  if (lse.data != nullptr) lse.data += begin * lse.token_stride;
  lse.num_tokens = count;
  return lse;
}

}  // namespace

int64_t check_slots(const Indices& slots, int64_t num_tokens, const Cache& cache) {
  PC_EXPECTS(slots.size <= num_tokens, ShapeError, "slot_mapping has ", slots.size, " entries for ", num_tokens,
             " tokens; it must not be longer than key and value");
  const int64_t limit = cache.num_blocks * cache.block_size;
  const SlotSurvey found = slots.wide ? survey<int64_t>(slots, limit) : survey<int32_t>(slots, limit);
  for (int64_t i = 0; found.is_past_end && i < slots.size; ++i) {
    const int64_t slot = slots.at(i);
    PC_EXPECTS(slot < limit, InvalidBlock, "slot_mapping[", i, "] is ", slot, " and the cache has ", limit, " slots (",
               cache.num_blocks, " blocks of ", cache.block_size, "); negative slots are skipped");
  }
  return found.written;
}

void write_kv(const WriteArgs& args, int64_t num_threads) {
  const KernelTable& table = kernels();
  check_slots(args.slots, args.value.num_tokens, args.value_cache);
  const int64_t tokens = check_slots(args.slots, args.key.num_tokens, args.key_cache);
  const int64_t bytes = tokens * (token_bytes(args.key_cache) + token_bytes(args.value_cache));
  WritePart whole;
  whole.args = &args;
  whole.streams = bytes > l2_bytes();
  const int64_t read = tokens * (token_bytes(args.key) + token_bytes(args.value));
  num_threads = threads_to_move(std::max(bytes, read), num_threads);
  if (num_threads == 1) return table.write(whole);
  whole.share.bits = share_bits(num_threads);
  parallel_for(int64_t{1} << whole.share.bits, num_threads, [&](int64_t unit, int64_t) noexcept {
    WritePart part = whole;
    part.share.index = static_cast<uint64_t>(unit);
    table.write(part);
  });
}

void merge(const MergeArgs& args, int64_t num_threads) {
  PC_ASSERT(args.mask == nullptr || args.out_a.type == args.out.type);  // tokens that it leaves out are copied
  const KernelTable& table = kernels();
  const int64_t tokens = args.out.num_tokens;
  const int64_t bytes = tokens * args.out.num_heads * args.out.dim * size_of(args.out.type);
  num_threads = std::min(threads_to_move(bytes, num_threads), tokens);
  if (num_threads <= 1) return table.merge(args);
  parallel_for(num_threads, num_threads, [&](int64_t unit, int64_t) noexcept {
    const int64_t begin = tokens * unit / num_threads, count = tokens * (unit + 1) / num_threads - begin;
    MergeArgs part{rows_from(args.out_a, begin, count), rows_from(args.out_b, begin, count),
                   rows_from(args.out, begin, count),   lse_from(args.lse_a, begin, count),
                   lse_from(args.lse_b, begin, count),  lse_from(args.lse, begin, count)};
    if (args.mask != nullptr) part.mask = args.mask + begin * args.mask_stride;
    part.mask_stride = args.mask_stride;
    table.merge(part);
  });
}

void check_parts(const Indices& cu_parts, int64_t num_parts) {
  for (int64_t i = 0, before = 0; i < cu_parts.size; ++i) {
    const int64_t at = cu_parts.at(i);
    PC_EXPECTS(i > 0 || at == 0, ShapeError, "cu_parts[0] is ", at, "; it must be 0");
    PC_EXPECTS(at >= before, ShapeError, "cu_parts[", i, "] is ", at, " after ", before, "; it must not decrease");
    PC_EXPECTS(at <= num_parts, ShapeError, "cu_parts[", i, "] is ", at, " and outs has ", num_parts,
               " parts; it must be at most that");
    before = at;
  }
}

void merge_many(const MergeManyArgs& args, int64_t num_threads) {
  constexpr int64_t kUnitsPerThread = 8;  // tokens differ in their parts
  const KernelTable& table = kernels();
  const bool is_ragged = args.cu_parts.data != nullptr;
  if (is_ragged) check_parts(args.cu_parts, args.parts.num_tokens);
  const int64_t rows = args.out.num_tokens * args.out.num_heads;
  const int64_t parts = args.parts.num_tokens * (is_ragged ? 1 : args.out.num_tokens) + args.out.num_tokens;
  num_threads = std::min(threads_to_move(parts * token_bytes(args.out), num_threads), rows);
  if (num_threads <= 1) return table.merge_many(args, 0, rows);
  const int64_t units = std::min(rows, kUnitsPerThread * num_threads);
  parallel_for(units, num_threads, [&](int64_t unit, int64_t) noexcept {
    table.merge_many(args, rows * unit / units, rows * (unit + 1) / units);
  });
}

}  // namespace pagecore::cpu
