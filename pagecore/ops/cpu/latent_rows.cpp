// Writes of quantised rows to latent and index caches, and copies of rows out of them.
#include <algorithm>
#include <cstring>
#include <vector>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/cost.hpp"
#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/latent.hpp"
#include "pagecore/ops/cpu/latent_codes.hpp"
#include "pagecore/ops/cpu/ops.hpp"
#include "pagecore/ops/cpu/threads.hpp"

namespace pagecore::cpu {
namespace {

// Numbers that one core quantises in a microsecond.
constexpr double kQuantisedPerUs = 400.0;

void read_numbers(const TokenArray& rows, int64_t token, float* out) {
  const char* row = rows.data + token * rows.token_stride;
  if (rows.type == Float::F32) return static_cast<void>(std::memcpy(out, row, static_cast<size_t>(4 * rows.dim)));
  const auto* halves = reinterpret_cast<const uint16_t*>(row);
  for (int64_t d = 0; d < rows.dim; ++d) out[d] = rows.type == Float::F16 ? from_f16(halves[d]) : from_bf16(halves[d]);
}

void quantise_e4m3(const float* x, int64_t count, float scale, char* to) {
  for (int64_t d = 0; d < count; ++d) to[d] = static_cast<char>(to_e4m3(x[d] / scale));
}

void write_fp8_ds_mla(const float* latent, const float* rope, char* row) {
  for (int64_t tile = 0; tile < kPackedLatentDim / kFp8Tile; ++tile) {
    const float* x = latent + tile * kFp8Tile;
    const float scale = power_of_two_above(std::max(greatest(x, kFp8Tile) / kE4M3Max, 1e-4f));
    quantise_e4m3(x, kFp8Tile, scale, row + tile * kFp8Tile);
    std::memcpy(row + kFp8ScaleAt + 4 * tile, &scale, sizeof scale);
  }
  for (int64_t d = 0; d < kPackedRopeDim; ++d) {
    const uint16_t number = to_bf16(rope[d]);
    std::memcpy(row + kFp8RopeAt + 2 * d, &number, sizeof number);
  }
}

// A NaN makes the scale of its group NaN, because e2m1 has none.
void write_nvfp4_group(const float* x, int64_t group, char* row) {
  if (std::any_of(x, x + kNvfp4Tile, [](float number) { return number != number; })) {
    row[nvfp4_scale_at(group)] = kE4M3NaN;
    std::memset(row + group * kNvfp4Tile / 2, 0, kNvfp4Tile / 2);
    return;
  }
  const uint8_t code = to_e4m3(std::max(greatest(x, kNvfp4Tile) / kE2M1Max, 0x1p-9f));
  const float scale = from_e4m3(code);
  row[nvfp4_scale_at(group)] = static_cast<char>(code);
  for (int64_t i = 0; i < kNvfp4Tile; i += 2) {
    const int pair = to_e2m1(x[i] / scale) | to_e2m1(x[i + 1] / scale) << 4;
    row[(group * kNvfp4Tile + i) / 2] = static_cast<char>(pair);
  }
}

void write_nvfp4_ds_mla(const float* latent, const float* rope, char* row) {
  for (int64_t group = 0; group < kPackedLatentDim / kNvfp4Tile; ++group) {
    write_nvfp4_group(latent + group * kNvfp4Tile, group, row);
  }
  quantise_e4m3(rope, kPackedRopeDim, 1.0f, row + kNvfp4RopeAt);
}

void write_row(const LatentWriteArgs& args, int64_t token, int64_t slot) {
  const int64_t block = slot / args.cache.block_size;
  float latent[kLatentWidthMax], rope[kLatentWidthMax];
  read_numbers(args.latent, token, latent);
  read_numbers(args.rope, token, rope);
  write_latent_numbers(args.cache, block, slot - block * args.cache.block_size, latent, rope, args.factor);
}

void write_index_row(const IndexWriteArgs& args, int64_t token, int64_t slot) {
  const Cache& keys = args.keys;
  const int64_t block = slot / keys.block_size, offset = slot - block * keys.block_size;
  float key[kLatentWidthMax];
  read_numbers(args.key, token, key);
  const float scale = power_of_two_above(std::max(greatest(key, keys.dim), 1e-4f) / kE4M3Max);
  quantise_e4m3(key, keys.dim, scale, keys.data + block * keys.block_stride + offset * keys.token_stride);
  std::memcpy(args.scales.data + block * args.scales.block_stride + offset * args.scales.token_stride, &scale, 4);
}

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

void write_latent_numbers(const LatentCache& cache, int64_t block, int64_t offset, const float* latent,
                          const float* rope, float factor) {
  char* row = cache.latent + block * cache.block_stride + offset * cache.token_stride;
  char* rope_row = cache.rope + block * cache.rope_block_stride + offset * cache.rope_token_stride;
  switch (cache.format) {
    case LatentFormat::Fp8DsMla: return write_fp8_ds_mla(latent, rope, row);
    case LatentFormat::Nvfp4DsMla: return write_nvfp4_ds_mla(latent, rope, row);
    default:
      quantise_e4m3(latent, cache.latent_dim, factor, row);
      quantise_e4m3(rope, cache.rope_dim, factor, rope_row);
  }
}

void write_latent(const LatentWriteArgs& args, int64_t num_threads) {
  Cache shape;
  shape.num_blocks = args.cache.num_blocks;
  shape.block_size = args.cache.block_size;
  check_slots(args.slots, args.latent.num_tokens, shape);
  const int64_t limit = shape.num_blocks * shape.block_size;
  for_each_slot(args.slots, args.latent.dim + args.rope.dim, num_threads, [&](int64_t token, int64_t slot) {
    if (slot < limit) write_row(args, token, slot);
  });
}

void write_index(const IndexWriteArgs& args, int64_t num_threads) {
  check_slots(args.slots, args.key.num_tokens, args.keys);
  const int64_t limit = args.keys.num_blocks * args.keys.block_size;
  for_each_slot(args.slots, args.key.dim, num_threads, [&](int64_t token, int64_t slot) {
    if (slot < limit) write_index_row(args, token, slot);
  });
}

void gather_latent(const LatentCache& cache, float factor, const PackedSequences& batch, char* out, Float type,
                   int64_t num_threads) {
  std::vector<CopyRun> runs;
  list_runs(batch, Direction::Gather, runs);
  const LatentKernels& table = *kernels().latent;
  const int64_t row_bytes = (cache.latent_dim + cache.rope_dim) * size_of(type);
  parallel_for(std::ssize(runs), threads_to_move(batch.num_tokens * row_bytes, num_threads),
               [&](int64_t i, int64_t) noexcept {
                 const CopyRun& run = runs[static_cast<size_t>(i)];
                 char* to = out + run.target * row_bytes;
                 if (run.source == kZeros) {
                   std::memset(to, 0, static_cast<size_t>(run.count * row_bytes));
                   return;
                 }
                 for (int64_t t = 0; t < run.count; ++t, to += row_bytes) {
                   const int64_t block = run.source + t / cache.block_size, offset = t % cache.block_size;
                   table.read_row(cache, block, offset, factor, to, type);
                 }
               });
}

}  // namespace pagecore::cpu
