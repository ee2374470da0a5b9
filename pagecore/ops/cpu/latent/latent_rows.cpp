// Writes of quantised rows to latent and index caches, and copies of rows out of them.
#include <algorithm>
#include <cstring>
#include <vector>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/latent/latent.hpp"
#include "pagecore/ops/cpu/ops.hpp"
#include "pagecore/ops/cpu/threads/cost.hpp"
#include "pagecore/ops/cpu/threads/threads.hpp"

namespace pagecore::cpu {
namespace {

// Numbers that one core quantises in a microsecond.
constexpr double kQuantisedPerUs = 2500.0;

// Calls write(token, slot) for each slot, divided by the place that is written, so that the later of two tokens with
// one slot is written last.
template <typename Write>
void for_each_slot(const Indices& slots, int64_t numbers, int64_t num_threads, Write&& write) {
  const double us = static_cast<double>(slots.size * numbers) / kQuantisedPerUs;
  num_threads = worthwhile_threads(us, num_threads);
  const int32_t bits = num_threads == 1 ? 0 : share_bits(num_threads);
  parallel_for(int64_t{1} << bits, num_threads, [&](int64_t unit, int64_t) noexcept {
    for (int64_t token = 0; token < slots.size; ++token) {
      const int64_t slot = slots.at(token);
      if (slot < 0 || share_of(static_cast<uint64_t>(slot / kSlotStretch), bits) != static_cast<uint64_t>(unit))
        continue;
      write(token, slot);
    }
  });
}

}  // namespace

void write_latent(const LatentWriteArgs& args, int64_t num_threads) {
  Cache shape;
  shape.num_blocks = args.cache.num_blocks;
  shape.block_size = args.cache.block_size;
  check_slots(args.slots, args.latent.num_tokens, shape);
  const int64_t limit = shape.num_blocks * shape.block_size;
  const LatentKernels& table = *kernels().latent;
  for_each_slot(args.slots, args.latent.dim + args.rope.dim, num_threads, [&](int64_t token, int64_t slot) {
    if (slot >= limit) return;
    const int64_t block = slot / args.cache.block_size;
    const LatentNumbers numbers{args.latent.data + token * args.latent.token_stride, args.latent.type,
                                args.rope.data + token * args.rope.token_stride, args.rope.type};
    table.write_row(args.cache, block, slot - block * args.cache.block_size, numbers, args.factor);
  });
}

void write_index(const IndexWriteArgs& args, int64_t num_threads) {
  check_slots(args.slots, args.key.num_tokens, args.keys);
  const int64_t limit = args.keys.num_blocks * args.keys.block_size;
  const LatentKernels& table = *kernels().latent;
  const Cache& keys = args.keys;
  for_each_slot(args.slots, args.key.dim, num_threads, [&](int64_t token, int64_t slot) {
    if (slot >= limit) return;
    const int64_t block = slot / keys.block_size, offset = slot - block * keys.block_size;
    table.write_key(args.key.data + token * args.key.token_stride, args.key.type, keys.dim,
                    keys.data + block * keys.block_stride + offset * keys.token_stride,
                    args.scales.data + block * args.scales.block_stride + offset * args.scales.token_stride);
  });
}

void gather_latent(const LatentCache& cache, float factor, const PackedSequences& batch, const LatentRows& out,
                   int64_t num_threads) {
  std::vector<CopyRun> runs;
  list_runs(batch, Direction::Gather, runs);
  const LatentKernels& table = *kernels().latent;
  const int64_t row_bytes = (cache.latent_dim + cache.rope_dim) * size_of(out.type);
  parallel_for(std::ssize(runs), threads_to_move(batch.num_tokens * row_bytes, num_threads),
               [&](int64_t i, int64_t) noexcept {
                 const CopyRun& run = runs[static_cast<size_t>(i)];
                 char* to = out.data + run.target * out.stride;
                 for (int64_t t = 0; t < run.count; ++t, to += out.stride) {
                   if (run.source == kZeros) {
                     std::memset(to, 0, static_cast<size_t>(row_bytes));
                     continue;
                   }
                   const int64_t block = run.source + t / cache.block_size, offset = t % cache.block_size;
                   table.read_row(cache, block, offset, factor, to, out.type);
                 }
               });
}

}  // namespace pagecore::cpu
