// Gather, scatter and transfer: the walk over each plane, the choice of streaming stores, and the kernel call.
#include "pagecore/ops/cpu/moves.hpp"

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <utility>
#include <vector>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/moves/stream_copies.hpp"
#include "pagecore/ops/cpu/ops.hpp"
#include "pagecore/ops/cpu/threads/cost.hpp"
#include "pagecore/ops/cpu/threads/threads.hpp"

namespace pagecore::cpu {
namespace {

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// An axis with its stride on both sides. `varies` marks the axis that runs count along.
struct Axis {
  MoveAxis on;
  bool varies;
};

// The axes of a run, longest target stride first. Axes that are contiguous with each other on both sides are joined.
class Axes {
 public:
  void add(int64_t size, int64_t source_stride, int64_t target_stride, bool varies = false) {
    if (size == 1 && !varies) return;
    int at = count_++;
    for (; at > 0 && std::llabs(axes_[at - 1].on.target_stride) < std::llabs(target_stride); --at)
      axes_[at] = axes_[at - 1];
    axes_[at] = {{size, source_stride, target_stride}, varies};
  }

  void lay_out(Move& move) {
    join();
    move.row = 1;
    move.scale = 1;
    const Axis* last = count_ > 0 ? &axes_[count_ - 1] : nullptr;
    const bool contiguous = last != nullptr && last->on.source_stride == move.source_itemsize &&
                            last->on.target_stride == move.target_itemsize;
    move.num_axes = contiguous ? count_ - 1 : count_;
    for (int i = 0; i < count_; ++i) {
      if (axes_[i].varies) {
        move.varying = i;
        move.scale = axes_[i].on.size;
      }
      if (i < move.num_axes) move.axes[i] = axes_[i].on;
    }
    if (contiguous && !last->varies) move.row = last->on.size;
  }

 private:
  // Joins each axis with the one inside it. The varying axis is never inside, because its size is unknown here.
  void join() {
    int kept = 0;
    for (int i = 1; i < count_; ++i) {
      Axis& outer = axes_[kept];
      const Axis& inner = axes_[i];
      const bool continues = !inner.varies && outer.on.source_stride == inner.on.size * inner.on.source_stride &&
                             outer.on.target_stride == inner.on.size * inner.on.target_stride;
      if (continues) {
        outer = {{outer.on.size * inner.on.size, inner.on.source_stride, inner.on.target_stride}, outer.varies};
      } else {
        axes_[++kept] = inner;
      }
    }
    if (count_ > 0) count_ = kept + 1;
  }

  Axis axes_[8];
  int count_ = 0;
};

void set_types(Move& move, const BlockArray& source, const BlockArray& target) {
  move.source = source.data;
  move.target = target.data;
  move.source_itemsize = source.itemsize;
  move.target_itemsize = target.itemsize;
  move.source_unit = source.block_stride;
  move.target_unit = target.block_stride;
  move.converts = source.dtype != target.dtype;
  if (!move.converts) return;
  PC_EXPECTS(source.dtype >= 0 && source.dtype <= static_cast<int32_t>(Float::BF16) && target.dtype >= 0 &&
                 target.dtype <= static_cast<int32_t>(Float::BF16),
             UnsupportedDtype, "dtype codes ", source.dtype, " and ", target.dtype,
             "; expected equal dtypes, or two of float32, float16 and bfloat16");
  move.from = static_cast<Float>(source.dtype);
  move.to = static_cast<Float>(target.dtype);
}

// Between a paged cache and packed sequences. Runs count tokens and break at blocks unless the blocks are contiguous.
Move move_tokens(const BlockArray& cache, const BlockArray& packed, Direction direction) {
  const bool gathers = direction == Direction::Gather;
  Move move;
  set_types(move, gathers ? cache : packed, gathers ? packed : cache);
  const int64_t tokens = cache.shape[0], token_stride = tokens == 1 ? cache.block_stride : cache.strides[0];
  move.piece = cache.block_stride == tokens * token_stride ? kUnlimited : tokens;
  (gathers ? move.source_piece : move.target_piece) = cache.block_stride;
  (gathers ? move.target_piece : move.source_piece) = tokens * packed.block_stride;
  Axes axes;
  axes.add(1, gathers ? token_stride : packed.block_stride, gathers ? packed.block_stride : token_stride, true);
  for (int i = 1; i < cache.ndim; ++i) {
    axes.add(cache.shape[i], gathers ? cache.strides[i] : packed.strides[i - 1],
             gathers ? packed.strides[i - 1] : cache.strides[i]);
  }
  axes.lay_out(move);
  return move;
}

// Between two caches. Runs count blocks.
Move move_blocks(const BlockArray& source, const BlockArray& target) {
  Move move;
  set_types(move, source, target);
  move.piece = kUnlimited;
  Axes axes;
  axes.add(1, source.block_stride, target.block_stride, true);
  for (int i = 0; i < source.ndim; ++i) axes.add(source.shape[i], source.strides[i], target.strides[i]);
  axes.lay_out(move);
  return move;
}

bool empty(const BlockArray& array, int first_axis) {
  for (int i = first_axis; i < array.ndim; ++i) {
    if (array.shape[i] == 0) return true;
  }
  return false;
}

int64_t fewest_blocks(const std::vector<BlockArray>& arrays) {
  int64_t fewest = kUnlimited;
  for (const BlockArray& array : arrays) fewest = std::min(fewest, array.num_blocks);
  return fewest;
}

int64_t elements(const BlockArray& array, int first_axis) {
  int64_t count = 1;
  for (int i = first_axis; i < array.ndim; ++i) count *= array.shape[i];
  return count;
}

// Divides runs into shares by stretches of blocks. A run is cut between blocks. On the side that is not the cache an
// index counts tokens, `step` per block; between two caches both sides count blocks and `step` is 1.
class RunShares {
 public:
  RunShares(const std::vector<CopyRun>& runs, Direction direction, int64_t step, int32_t bits)
      : shares_(size_t{1} << bits), bits_(bits) {
    for (CopyRun run : runs) {
      while (run.count > 0) {
        const bool is_hole = run.source == kZeros, counts_source = direction == Direction::Gather && !is_hole;
        const int64_t block = counts_source ? run.source : is_hole ? 0 : run.target;
        const int64_t blocks = kStretch - block % kStretch, count = std::min(run.count, blocks * step);
        add({run.source, run.target, count});
        if (!is_hole) run.source += counts_source ? blocks : count;
        run.target += counts_source || is_hole ? count : blocks;
        run.count -= count;
      }
    }
  }

  [[nodiscard]] std::vector<std::vector<CopyRun>> take() && { return std::move(shares_); }

 private:
  static constexpr int64_t kStretch = 8;

  void add(const CopyRun& run) {
    shares_[share_of(static_cast<uint64_t>(run.target / kStretch), bits_)].push_back(run);
  }

  std::vector<std::vector<CopyRun>> shares_;
  int32_t bits_;
};

PlannedMoves plan_moves(std::vector<Move> moves, std::vector<CopyRun> runs, int64_t written, Direction direction,
                        int64_t step, int64_t num_threads) {
  if (moves.empty() || runs.empty()) return {};
  PlannedMoves plan{kernels().move, std::move(moves), {}, threads_to_move(written, num_threads)};
  for (Move& move : plan.moves) move.streams = written > l2_bytes();
  if (plan.num_threads > 1) {
    plan.shares = RunShares(runs, direction, step, share_bits(plan.num_threads)).take();
  } else {
    plan.shares.push_back(std::move(runs));
  }
  return plan;
}

void move_sequences(const std::vector<BlockArray>& caches, const std::vector<BlockArray>& packed,
                    const PackedSequences& batch, Direction direction, int64_t num_threads) {
  std::vector<CopyRun> runs;
  const int64_t copied = list_runs(batch, direction, runs);
  std::vector<Move> moves;
  int64_t written = 0;
  for (size_t i = 0; i < caches.size(); ++i) {
    if (empty(caches[i], 1)) continue;
    moves.push_back(move_tokens(caches[i], packed[i], direction));
    written += copied * elements(caches[i], 1) * moves.back().target_itemsize;
  }
  plan_moves(std::move(moves), std::move(runs), written, direction, batch.block_size, num_threads).run();
}

}  // namespace

void PlannedMoves::run() const noexcept {
  parallel_for(std::ssize(shares), num_threads, [&](int64_t unit, int64_t) noexcept {
    const std::vector<CopyRun>& runs = shares[static_cast<size_t>(unit)];
    for (const Move& each : moves) move(each, runs.data(), std::ssize(runs));
  });
}

void check_sequences(const PackedSequences& batch) {
  std::vector<CopyRun> runs;
  list_runs(batch, Direction::Gather, runs);
}

void check_transferred(const std::vector<BlockArray>& sources, const std::vector<BlockArray>& targets,
                       const Indices& source_ids, const Indices& target_ids, int64_t lowest) {
  std::vector<CopyRun> runs;
  list_pairs(source_ids, target_ids, fewest_blocks(sources), fewest_blocks(targets), lowest, runs);
}

void gather_blocks(const std::vector<BlockArray>& caches, const std::vector<BlockArray>& packed,
                   const PackedSequences& batch, int64_t num_threads) {
  move_sequences(caches, packed, batch, Direction::Gather, num_threads);
}

void scatter_blocks(const std::vector<BlockArray>& packed, const std::vector<BlockArray>& caches,
                    const PackedSequences& batch, int64_t num_threads) {
  move_sequences(caches, packed, batch, Direction::Scatter, num_threads);
}

PlannedMoves plan_transfer(const std::vector<BlockArray>& sources, const std::vector<BlockArray>& targets,
                           const Indices& source_ids, const Indices& target_ids, int64_t num_threads, int64_t lowest) {
  std::vector<CopyRun> runs;
  const int64_t copied =
      list_pairs(source_ids, target_ids, fewest_blocks(sources), fewest_blocks(targets), lowest, runs);
  std::vector<Move> moves;
  int64_t written = 0;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (empty(sources[i], 0)) continue;
    moves.push_back(move_blocks(sources[i], targets[i]));
    written += copied * elements(sources[i], 0) * moves.back().target_itemsize;
  }
  return plan_moves(std::move(moves), std::move(runs), written, Direction::Scatter, 1, num_threads);
}

void transfer_blocks(const std::vector<BlockArray>& sources, const std::vector<BlockArray>& targets,
                     const Indices& source_ids, const Indices& target_ids, int64_t num_threads, int64_t lowest) {
  plan_transfer(sources, targets, source_ids, target_ids, num_threads, lowest).run();
}

void stream_copies(const BlockArray& array, const std::vector<CopyRun>& runs, int64_t part, int64_t num_parts) {
  BlockArray cut = array;
  int outer = 0;  // the axis of the longest stride is divided
  for (int i = 1; i < array.ndim; ++i) {
    if (array.shape[i] > 1 && std::llabs(array.strides[i]) > std::llabs(array.strides[outer])) outer = i;
  }
  if (array.ndim > 0) {
    const int64_t begin = array.shape[outer] * part / num_parts;
    cut.data += begin * array.strides[outer];
    cut.shape[outer] = array.shape[outer] * (part + 1) / num_parts - begin;
  } else if (part > 0) {
    return;
  }
  if (runs.empty() || empty(cut, 0)) return;
  Move move = move_blocks(cut, cut);
  move.streams = true;
  kernels().move(move, runs.data(), std::ssize(runs));
}

}  // namespace pagecore::cpu
