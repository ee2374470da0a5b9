// The layout of a block in two arrays, and the unit that a thread moves at once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/args.hpp"
#include "pagecore/ops/cuda/device_args.hpp"
#include "pagecore/ops/cuda/launch.hpp"

namespace pagecore::cuda {

inline constexpr int32_t kBytes = -1;  // in place of a dtype: bytes are copied unchanged

// The template arguments of a kernel: a Float, or kBytes.
struct MoveTypes {
  int32_t from = kBytes;
  int32_t to = kBytes;
};

// Everything that a launch depends on except addresses. Arrays with equal plans share a launch.
struct MovePlan {
  PcMoveShape shape = {};
  MoveTypes types;
  int64_t source_block_stride = 0;
  int64_t target_block_stride = 0;

  bool operator==(const MovePlan& other) const { return std::memcmp(this, &other, sizeof(*this)) == 0; }
};
static_assert(std::is_trivially_copyable_v<MovePlan> && sizeof(MovePlan) == sizeof(PcMoveShape) + 24,
              "plans are compared by their bytes, so they must not have padding");

namespace internal {

struct MoveAxis {
  int64_t size;
  int64_t source_stride;  // bytes
  int64_t target_stride;
};

// The axes of a move, outermost first.
class MoveAxes {
 public:
  // Add the tokens of a block. Any number of them may move, so this axis remains outermost.
  void add_tokens(int64_t size, int64_t source_stride, int64_t target_stride) {
    num_tokens_ = size;
    axes_.insert(axes_.begin(), {size, source_stride, target_stride});
  }

  // Insert an axis in order of decreasing target strides, so that a warp writes adjacent elements.
  void add(int64_t size, int64_t source_stride, int64_t target_stride) {
    if (size == 1) return;
    const size_t first = num_tokens_ > 0 ? 1 : 0;
    size_t at = axes_.size();
    axes_.push_back({size, source_stride, target_stride});
    for (; at > first && std::llabs(axes_[at - 1].target_stride) < std::llabs(target_stride); --at) {
      std::swap(axes_[at - 1], axes_[at]);
    }
  }

  // Choose the unit and write the shape. `source_bits` and `target_bits` are the addresses and block strides, or-ed. A
  // unit is a multiple of an item.
  void lay_out(PcMoveShape& shape, uint64_t source_bits, uint64_t target_bits, int64_t source_item,
               int64_t target_item) {
    join();
    for (size_t i = 0; i + 1 < axes_.size(); ++i) {
      source_bits |= bits_of(axes_[i].source_stride);
      target_bits |= bits_of(axes_[i].target_stride);
    }
    int64_t unit = 1;
    if (!axes_.empty() && axes_.back().source_stride == source_item && axes_.back().target_stride == target_item) {
      MoveAxis& last = axes_.back();
      const int64_t row = axes_.size() == 1 && num_tokens_ > 0 ? last.size / num_tokens_ : last.size;
      unit = 16 / std::min(source_item, target_item);
      while (row % unit != 0 || !allows(source_bits, unit * source_item) || !allows(target_bits, unit * target_item)) {
        unit /= 2;
      }
      last = {last.size / unit, last.source_stride * unit, last.target_stride * unit};
    }
    write(shape, unit);
  }

 private:
  // Join adjacent axes that are contiguous in both arrays.
  void join() {
    size_t kept = 0;
    for (size_t i = 1; i < axes_.size(); ++i) {
      MoveAxis& outer = axes_[kept];
      const MoveAxis& inner = axes_[i];
      if (outer.source_stride == inner.size * inner.source_stride &&
          outer.target_stride == inner.size * inner.target_stride) {
        outer = {outer.size * inner.size, inner.source_stride, inner.target_stride};
      } else {
        axes_[++kept] = inner;
      }
    }
    if (!axes_.empty()) axes_.resize(kept + 1);
  }

  void write(PcMoveShape& shape, int64_t unit) const {
    int64_t units = 1;
    for (const MoveAxis& axis : axes_) {
      PC_EXPECTS(axis.size <= kMaxUnits / units, ShapeError, "a block has more than ", kMaxUnits, " pieces of ", unit,
                 " elements or bytes; use smaller blocks on CUDA");
      units *= axis.size;
    }
    shape.num_axes = static_cast<pc_int32>(axes_.size());
    shape.unit = static_cast<pc_int32>(unit);
    shape.num_units = static_cast<pc_int32>(units);
    for (size_t i = 0; i < axes_.size(); ++i) {
      shape.axes[i] = {axes_[i].source_stride, axes_[i].target_stride, make_divisor(axes_[i].size), 0};
    }
    if (num_tokens_ > 0) shape.units_per_token = static_cast<pc_int32>(units / num_tokens_);
  }

  std::vector<MoveAxis> axes_;
  int64_t num_tokens_ = 0;
};

inline uint64_t address_bits(const BlockArray& array) {
  const uint64_t address = address_of(array.data);
  return array.num_blocks > 1 ? address | bits_of(array.block_stride) : address;
}

// Casts load and store whole numbers, which must be aligned.
inline void check_aligned(const BlockArray& array) {
  uint64_t bits = address_bits(array);
  for (int i = 0; i < array.ndim; ++i) bits |= array.shape[i] > 1 ? bits_of(array.strides[i]) : 0;
  PC_EXPECTS(allows(bits, array.itemsize), ShapeError, "an array at ", static_cast<const void*>(array.data),
             ", or a stride of it, is not a multiple of ", array.itemsize,
             " bytes; a cast on CUDA needs aligned numbers: pass a copy");
}

inline MovePlan make_plan(const BlockArray& source, const BlockArray& target, MoveAxes& axes) {
  MovePlan plan;
  plan.source_block_stride = source.block_stride;
  plan.target_block_stride = target.block_stride;
  if (source.dtype == target.dtype) {
    axes.add(source.itemsize, 1, 1);
    axes.lay_out(plan.shape, address_bits(source), address_bits(target), 1, 1);
    return plan;
  }
  check_aligned(source);
  check_aligned(target);
  plan.types = {source.dtype, target.dtype};
  axes.lay_out(plan.shape, address_bits(source), address_bits(target), source.itemsize, target.itemsize);
  return plan;
}

}  // namespace internal

[[nodiscard]] inline MovePlan plan_blocks(const BlockArray& source, const BlockArray& target) {
  internal::MoveAxes axes;
  for (int i = 0; i < source.ndim; ++i) axes.add(source.shape[i], source.strides[i], target.strides[i]);
  return internal::make_plan(source, target, axes);
}

// Plan a move between a cache and a packed array; the blocks of the packed array are tokens.
[[nodiscard]] inline MovePlan plan_tokens(const BlockArray& cache, const BlockArray& packed, bool gathers) {
  internal::MoveAxes axes;
  const int64_t size = cache.shape[0], paged = cache.strides[0], row = packed.block_stride;
  axes.add_tokens(size, gathers ? paged : row, gathers ? row : paged);
  for (int i = 1; i < cache.ndim; ++i) {
    const int64_t in_cache = cache.strides[i], in_packed = packed.strides[i - 1];
    axes.add(cache.shape[i], gathers ? in_cache : in_packed, gathers ? in_packed : in_cache);
  }
  return gathers ? internal::make_plan(cache, packed, axes) : internal::make_plan(packed, cache, axes);
}

}  // namespace pagecore::cuda
