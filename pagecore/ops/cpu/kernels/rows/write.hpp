// Slot-mapped write: rows of new tokens to cache slots, with dtype conversion or quantised.
#pragma once

#include <type_traits>

#include "pagecore/ops/cpu/kernels/rows/convert_rows.hpp"
#include "pagecore/ops/cpu/kernels/rows/move.hpp"
#include "pagecore/ops/cpu/kernels/rows/quantize.hpp"
#include "pagecore/ops/cpu/kernels/simd/lines.hpp"
#include "pagecore/ops/cpu/moves.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// Consecutive tokens with consecutive slots, within one stretch of one block.
struct SlotRun {
  int64_t token;
  int64_t block;
  int64_t offset;  // offset of the first slot in its block
  int64_t count;
};

constexpr int64_t kRunBatch = 64;

// Lists the runs of one part of a call, a batch at a time.
class SlotRuns {
 public:
  SlotRuns(const WritePart& part, const Cache& cache)
      : slots_(part.args->slots),
        num_slots_(static_cast<uint64_t>(cache.num_blocks * cache.block_size)),
        block_size_(static_cast<uint64_t>(cache.block_size)),
        shift_(__builtin_ctzll(block_size_)),
        is_power_(uint64_t{1} << shift_ == block_size_),
        share_(part.share) {}

  // Lists the next runs and returns their number; 0 after the last.
  int64_t list(SlotRun* runs) { return slots_.wide ? list_as<int64_t>(runs) : list_as<int32_t>(runs); }

 private:
  template <typename Id>
  int64_t list_as(SlotRun* runs) {
    const char* data = slots_.data;
    const int64_t stride = slots_.stride, size = slots_.size;
    // As uint64, a negative slot is out of range too. A single load; see Indices::at.
    const auto at = [=](int64_t token) {
      return static_cast<uint64_t>(
          int64_t{__atomic_load_n(reinterpret_cast<const Id*>(data + token * stride), __ATOMIC_RELAXED)});
    };
    int64_t token = token_, listed = 0;
    while (token < size && listed < kRunBatch) {
      const uint64_t slot = at(token);
      if (slot >= num_slots_ || !is_ours(slot)) {
        const bool are_many = stride == sizeof(Id) && slot < num_slots_ && size - token >= kSlotStretch &&
                              in_stretch(at(token + kSlotStretch - 1), slot);
        const bool are_all = are_many && are_together(reinterpret_cast<const Id*>(data) + token, slot);
        token += are_all ? kSlotStretch : 1;
        continue;
      }
      const uint64_t block = is_power_ ? slot >> shift_ : slot / block_size_, offset = slot - block * block_size_;
      int64_t room = kSlotStretch - static_cast<int64_t>(slot % kSlotStretch);
      if (static_cast<int64_t>(block_size_ - offset) < room) room = static_cast<int64_t>(block_size_ - offset);
      if (size - token < room) room = size - token;
      int64_t count = 1;
      while (count < room && at(token + count) == slot + static_cast<uint64_t>(count)) ++count;
      runs[listed++] = {token, static_cast<int64_t>(block), static_cast<int64_t>(offset), count};
      token += count;
    }
    token_ = token;
    return listed;
  }

  // True if two slots are in one stretch.
  PC_FORCE_INLINE static bool in_stretch(uint64_t a, uint64_t b) {
    return (a ^ b) < static_cast<uint64_t>(kSlotStretch);
  }

  // True if the slots of kSlotStretch tokens, which another share writes, are all in the stretch of `slot`. Another
  // thread may change them meanwhile; then it decides for the changed tokens alone.
  template <typename Id>
  PC_FORCE_INLINE static bool are_together(const Id* slots, uint64_t slot) {
    using Bits = std::make_unsigned_t<Id>;
    Bits differs = 0;
    for (int64_t i = 0; i < kSlotStretch; ++i) differs |= static_cast<Bits>(slots[i]) ^ static_cast<Bits>(slot);
    return __builtin_expect(differs < static_cast<Bits>(kSlotStretch), 1);
  }

  PC_FORCE_INLINE bool is_ours(uint64_t slot) const {
    return share_.bits == 0 || share_of(slot / kSlotStretch, share_.bits) == share_.index;
  }

  Indices slots_;
  uint64_t num_slots_;
  uint64_t block_size_;
  int shift_;
  bool is_power_;
  Share share_;
  int64_t token_ = 0;
};

// The key or the value of a write.
struct WritePlane {
  const TokenArray& rows;
  const Cache& cache;
  const PerHead& scale;
};

// Properties shared by the rows of a run.
struct RunShape {
  int64_t next_source;  // bytes from this run to the next one, in the source and the target
  int64_t next_target;
  bool is_cut;      // a piece starts or ends within a cache line; no other row precedes it in the cache
  bool is_one_row;  // each piece is a row
  bool is_short;    // a piece is so short that its first and last lines matter
};

constexpr int64_t kShortPiece = 1024;

// Calls visit(target, source, elements, head, shape) for the rows of all runs, in the memory order of the cache. A row
// extends as long as it is contiguous on both sides: over the heads of a token, the tokens of a run, or both.
template <typename Visit>
inline void visit_rows(const WritePlane& plane, SlotRuns slots, Visit&& visit) {
  const TokenArray& rows = plane.rows;
  const Cache& cache = plane.cache;
  const MoveAxis heads{rows.num_heads, rows.head_stride, cache.head_stride};
  MoveAxis tokens{1, rows.token_stride, cache.token_stride};
  const bool heads_outside = __builtin_llabs(heads.target_stride) > __builtin_llabs(tokens.target_stride);
  const int64_t source_size = size_of(rows.type), target_size = size_of(cache.type);
  const auto joins = [=](const MoveAxis& axis, int64_t row) {
    return axis.size == 1 || (axis.source_stride == row * source_size && axis.target_stride == row * target_size);
  };
  const auto source_of = [&](const SlotRun& run) { return rows.data + run.token * rows.token_stride; };
  const auto target_of = [&](const SlotRun& run) {
    return cache.data + run.block * cache.block_stride + run.offset * cache.token_stride;
  };
  SlotRun runs[kRunBatch];
  while (const int64_t listed = slots.list(runs)) {
    for (int64_t i = 0; i < listed; ++i) {
      const char* source = source_of(runs[i]);
      char* target = target_of(runs[i]);
      tokens.size = runs[i].count;
      MoveAxis outer = heads_outside ? heads : tokens, inner = heads_outside ? tokens : heads;
      int64_t row = rows.dim;
      // With scales, each head has its own divisor, so rows stay per head.
      if (plane.scale.data == nullptr && joins(inner, row)) {
        row *= inner.size;
        inner.size = 1;
        if (joins(outer, row)) {
          row *= outer.size;
          outer.size = 1;
        }
      }
      const SlotRun& next = runs[i + 1 < listed ? i + 1 : i];
      const int64_t row_bytes = row * target_size;
      const int64_t piece = inner.target_stride == row_bytes ? inner.size * row_bytes : row_bytes;
      const bool is_cut = reinterpret_cast<uintptr_t>(target) % kLine != 0 || piece % kLine != 0;
      const RunShape shape{source_of(next) - source, target_of(next) - target, is_cut, piece == row_bytes,
                           piece < kShortPiece};
      for (int64_t j = 0; j < outer.size; ++j) {
        for (int64_t k = 0; k < inner.size; ++k) {
          visit(target + j * outer.target_stride + k * inner.target_stride,
                source + j * outer.source_stride + k * inner.source_stride, row, heads_outside ? j : k, shape);
        }
      }
    }
  }
}

// Prefetches the first and last line of the next row, which streaming stores must merge with neighbouring data.
PC_FORCE_INLINE void fetch_ends(const char* row, int64_t bytes, const RunShape& shape) {
  if (!shape.is_cut || !shape.is_one_row) return;
  prefetch_line(row + shape.next_target);
  prefetch_line(row + shape.next_target + bytes - 1);
}

inline void copy_plane(const WritePlane& plane, const SlotRuns& slots, bool streams) {
  const int64_t size = size_of(plane.cache.type);
  const auto copy = [=](char* target, const char* source, int64_t row, int64_t, const RunShape& shape) {
    copy_row<kLine>(target, source, row * size, target + shape.next_target);
  };
  if (!streams) return visit_rows(plane, slots, copy);
  LineWriter writer;
  visit_rows(plane, slots, [&](char* target, const char* source, int64_t row, int64_t head, const RunShape& shape) {
    if (shape.is_cut && shape.is_short) {
      writer.finish();
      return copy(target, source, row, head, shape);
    }
    fetch_ends(target, row * size, shape);
    writer.write(target, source, row * size, shape.next_source);
  });
  writer.finish();
}

inline void convert_plane(const WritePlane& plane, const SlotRuns& slots, bool streams) {
  const Convert convert = conversion(plane.rows.type, plane.cache.type, plane.scale.data != nullptr);
  const int64_t source_size = size_of(plane.rows.type), target_size = size_of(plane.cache.type);
  const auto write = [&](char* target, const char* source, int64_t row, int64_t head, const RunShape& shape) {
    prefetch_bytes(target + shape.next_target, row * target_size);
    prefetch_line(target + shape.next_target + row * target_size - 1);
    convert(source, target, row, head_value(plane.scale, head, 1.0f));
  };
  if (!streams) return visit_rows(plane, slots, write);
  LineWriter writer;
  visit_rows(plane, slots, [&](char* target, const char* source, int64_t row, int64_t head, const RunShape& shape) {
    if (shape.is_cut && shape.is_short) {
      writer.finish();
      return write(target, source, row, head, shape);
    }
    fetch_ends(target, row * target_size, shape);
    const float divisor = head_value(plane.scale, head, 1.0f);
    for (int64_t i = 0; i < row; i += kPart) {
      const int64_t count = row - i < kPart ? row - i : kPart;
      const char* part = source + i * source_size;
      if (row <= kPart) prefetch_bytes(part + shape.next_source, count * source_size);
      convert(part, writer.reserve(target + i * target_size, count * target_size), count, divisor);
    }
  });
  writer.finish();
}

// Distances between rows of a token and head: of the source, of the codes, and of the scales.
struct RowSteps {
  int64_t size;
  int64_t source;
  int64_t codes;
  int64_t scales;
};

// Quantises the rows of all runs, in the memory order of the codes, but all heads of a single token at once: the scales
// of a batch of rows are computed together.
inline void quantize_plane(const WritePlane& plane, SlotRuns slots, bool four_over_six) {
  const TokenArray& rows = plane.rows;
  const Cache& cache = plane.cache;
  const ScalePlane& scales = cache.scales;
  const QuantizeRows quantize = quantizer(rows.type, cache.format, four_over_six);
  const float factor = head_value(plane.scale, 0, 1.0f);
  const RowSteps heads{rows.num_heads, rows.head_stride, cache.head_stride, scales.head_stride};
  RowSteps tokens{1, rows.token_stride, cache.token_stride, scales.token_stride};
  const bool heads_outside = __builtin_llabs(heads.codes) > __builtin_llabs(tokens.codes);
  const auto source_of_run = [&](const SlotRun& run) { return rows.data + run.token * rows.token_stride; };
  const auto codes_of_run = [&](const SlotRun& run) {
    return cache.data + run.block * cache.block_stride + run.offset * cache.token_stride;
  };
  const auto scales_of_run = [&](const SlotRun& run) {
    return scales.data + run.block * scales.block_stride + run.offset * scales.token_stride;
  };
  SlotRun runs[kRunBatch];
  while (const int64_t listed = slots.list(runs)) {
    for (int64_t i = 0; i < listed; ++i) {
      const SlotRun &run = runs[i], &next = runs[i + 1 < listed ? i + 1 : i];
      const char* source = source_of_run(run);
      char *codes = codes_of_run(run), *scale = scales_of_run(run);
      tokens.size = run.count;
      const bool by_head = heads_outside && run.count > 1;
      const RowSteps &outer = by_head ? heads : tokens, &inner = by_head ? tokens : heads;
      RowBatch batch{nullptr, nullptr, nullptr, inner.source, inner.codes, inner.scales, inner.size, rows.dim, factor};
      batch.next_source = source_of_run(next) - source;
      batch.next_codes = codes_of_run(next) - codes;
      batch.next_scales = scales_of_run(next) - scale;
      for (int64_t j = 0; j < outer.size; ++j) {
        batch.source = source + j * outer.source;
        batch.codes = codes + j * outer.codes;
        batch.scales = scale + j * outer.scales;
        quantize(batch);
      }
    }
  }
}

inline void write_plane(const WritePlane& plane, const WritePart& part) {
  const SlotRuns slots(part, plane.cache);
  if (plane.cache.scales.data != nullptr) {
    quantize_plane(plane, slots, part.args->four_over_six);
  } else if (plane.rows.type == plane.cache.type && plane.scale.data == nullptr) {
    copy_plane(plane, slots, part.streams);
  } else {
    convert_plane(plane, slots, part.streams);
  }
}

inline void write(const WritePart& part) {
  const WriteArgs& args = *part.args;
  write_plane({args.key, args.key_cache, args.key_scale}, part);
  write_plane({args.value, args.value_cache, args.value_scale}, part);
  if (part.streams) finish_streams();
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
