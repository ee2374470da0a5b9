#include "pagecore/ops/cpu/moves/slot_moves.hpp"

#include <algorithm>
#include <cstring>

#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/select_args.hpp"
#include "pagecore/ops/cpu/threads/cost.hpp"
#include "pagecore/ops/cpu/threads/threads.hpp"

namespace pagecore::cpu {
namespace {

// One token of an array: `pieces` of contiguous bytes, at every index of the axes before them.
struct TokenShape {
  explicit TokenShape(const BlockArray& array) : bytes(array.itemsize), num_axes(array.ndim) {
    while (num_axes > 1 && (array.strides[num_axes - 1] == bytes || array.shape[num_axes - 1] == 1)) {
      bytes *= array.shape[--num_axes];
    }
    for (int32_t axis = 1; axis < num_axes; ++axis) pieces *= array.shape[axis];
  }

  // The offset of piece i, from the token's first byte.
  [[nodiscard]] int64_t offset(const BlockArray& array, int64_t i) const {
    int64_t found = 0;
    for (int32_t axis = num_axes - 1; axis >= 1; --axis) {
      found += i % array.shape[axis] * array.strides[axis];
      i /= array.shape[axis];
    }
    return found;
  }

  int64_t bytes;
  int32_t num_axes;  // the block's token axis is axis 0
  int64_t pieces = 1;
};

void move_in_array(const BlockArray& array, const int64_t* sources, const int64_t* targets, int64_t count) {
  const TokenShape token(array);
  const int64_t block_size = array.shape[0];
  const auto at = [&](int64_t slot) {
    return array.data + slot / block_size * array.block_stride + slot % block_size * array.strides[0];
  };
  for (int64_t i = 0; i < count; ++i) {
    if (sources[i] == targets[i]) continue;
    const char* source = at(sources[i]);
    char* target = at(targets[i]);
    for (int64_t piece = 0; piece < token.pieces; ++piece) {
      const int64_t offset = token.offset(array, piece);
      std::memcpy(target + offset, source + offset, static_cast<size_t>(token.bytes));
    }
  }
}

int64_t token_bytes(const BlockArray& array) {
  const TokenShape token(array);
  return token.bytes * token.pieces;
}

}  // namespace

void move_slots(const std::vector<BlockArray>& arrays, const int64_t* sources, const int64_t* targets, int64_t count,
                int64_t num_threads) noexcept {
  int64_t bytes = 0;
  for (const BlockArray& array : arrays) bytes += 2 * count * token_bytes(array);
  parallel_for(std::ssize(arrays), threads_to_move(bytes, num_threads), [&](int64_t i, int64_t) noexcept {
    move_in_array(arrays[static_cast<size_t>(i)], sources, targets, count);
  });
}

void renew_bounds(const std::vector<BoundedKeys>& planes, const int64_t* slots, int64_t count,
                  int64_t num_threads) noexcept {
  const KernelTable& table = kernels();
  int64_t bytes = 0;
  for (const BoundedKeys& each : planes) bytes += count * each.key.num_heads * each.key.dim * size_of(each.key.type);
  parallel_for(std::ssize(planes), threads_to_move(bytes, num_threads), [&](int64_t i, int64_t) noexcept {
    const auto& [key, low, high] = planes[static_cast<size_t>(i)];
    for (int64_t first = 0, next = 0; first < count; first = next) {
      for (next = first + 1; next < count && slots[next] == slots[next - 1] + 1 && slots[next] % key.block_size != 0;)
        ++next;
      SummaryArgs args;
      args.num_blocks = key.num_blocks;
      args.block_size = key.block_size;
      args.low = low;
      args.high = high;
      args.slots = {reinterpret_cast<const char*>(slots + first), next - first, 8, true};
      args.key = {key.data + slots[first] / key.block_size * key.block_stride,
                  key.type,
                  args.slots.size,
                  key.num_heads,
                  key.dim,
                  key.token_stride,
                  key.head_stride};
      table.summarise(args, 0, key.num_heads);
    }
  });
}

}  // namespace pagecore::cpu
