// Conversions of stored rows between formats, divided among threads by blocks.
#include "pagecore/ops/cpu/codecs/conversions.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <unordered_map>
#include <vector>

#include "pagecore/ops/cpu/codec.hpp"
#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/moves/run_list.hpp"
#include "pagecore/ops/cpu/threads/cost.hpp"
#include "pagecore/ops/cpu/threads/scratch_buffer.hpp"
#include "pagecore/ops/cpu/threads/threads.hpp"

namespace pagecore::cpu {
namespace {

// Numbers that one core reads from one format and writes in another in a microsecond.
constexpr double kConvertedPerUs = 1000.0;

struct BlockPair {
  int64_t source;
  int64_t target;
};

// One head of a block: rows of tokens.
struct HeadRows {
  char* codes;
  char* scales;
  int64_t step;
  int64_t scales_step;
};

HeadRows rows_of(const Cache& cache, int64_t block, int64_t head) {
  const ScalePlane& scales = cache.scales;
  char* const stored =
      scales.data == nullptr ? nullptr : scales.data + block * scales.block_stride + head * scales.head_stride;
  return {cache.data + block * cache.block_stride + head * cache.head_stride, stored, cache.token_stride,
          scales.token_stride};
}

const float* factor_of(const float* factors, int64_t head) { return factors == nullptr ? nullptr : factors + head; }

// The codec between the rows of a head and numbers at `numbers`.
Codec codec_of(const Cache& cache, const HeadRows& rows, const float* factor, char* numbers, int64_t step, Float type) {
  Codec codec;
  codec.numbers = numbers;
  codec.numbers_stride = step;
  codec.type = type;
  codec.codes = rows.codes;
  codec.codes_stride = rows.step;
  codec.scales = rows.scales;
  codec.scales_stride = rows.scales_step;
  codec.num_rows = cache.block_size;
  codec.dim = cache.dim;
  codec.format = cache.format;
  codec.factors = factor;
  codec.num_factors = factor == nullptr ? 0 : 1;
  return codec;
}

void copy_head(const BlockConversion& caches, const HeadRows& from, const HeadRows& to) {
  const auto codes = static_cast<size_t>(row_bytes(caches.source)),
             scales = static_cast<size_t>(scale_bytes(caches.source));
  for (int64_t token = 0; token < caches.source.block_size; ++token) {
    std::memcpy(to.codes + token * to.step, from.codes + token * from.step, codes);
    if (scales > 0) std::memcpy(to.scales + token * to.scales_step, from.scales + token * from.scales_step, scales);
  }
}

void convert_head(const KernelTable& table, const BlockConversion& caches, const BlockPair& pair, int64_t head,
                  float* scratch) {
  const Cache &source = caches.source, &target = caches.target;
  const int64_t tokens = source.block_size;
  const HeadRows from = rows_of(source, pair.source, head), to = rows_of(target, pair.target, head);
  if (caches.copies) return copy_head(caches, from, to);
  char* numbers = reinterpret_cast<char*>(scratch);
  int64_t step = source.dim * 4;
  Float type = Float::F32;
  if (source.format == Format::Plain) numbers = from.codes, step = from.step, type = source.type;
  if (target.format == Format::Plain) numbers = to.codes, step = to.step, type = target.type;
  if (source.format != Format::Plain) {
    table.dequantize(codec_of(source, from, factor_of(caches.source_factors, head), numbers, step, type), 0, tokens);
  }
  if (target.format != Format::Plain) {
    table.quantize(codec_of(target, to, factor_of(caches.target_factors, head), numbers, step, type), 0, tokens);
  }
}

bool are_equal(const float* factors, int64_t count) {
  return factors == nullptr || std::equal(factors, factors + count - 1, factors + 1);
}

// True if the rows of a block follow each other at one distance, token by token or head by head.
bool has_one_step(const Cache& cache, bool by_head) {
  const auto follows = [&](int64_t tokens, int64_t heads) {
    return by_head ? heads == tokens * cache.block_size : tokens == heads * cache.num_heads;
  };
  return follows(cache.token_stride, cache.head_stride) &&
         (cache.scales.data == nullptr || follows(cache.scales.token_stride, cache.scales.head_stride));
}

// The rows of a block as those of one head.
Cache joined(Cache cache, bool by_head) {
  cache.block_size *= cache.num_heads;
  cache.num_heads = 1;
  if (by_head) return cache;
  cache.token_stride = cache.head_stride;
  cache.scales.token_stride = cache.scales.head_stride;
  return cache;
}

// Joins the heads of both caches, so that fewer and longer lists of rows are converted.
BlockConversion joined(const BlockConversion& caches) {
  const Cache &source = caches.source, &target = caches.target;
  const bool factors_are_equal =
      are_equal(caches.source_factors, source.num_heads) && are_equal(caches.target_factors, target.num_heads);
  BlockConversion result = caches;
  for (const bool by_head : {false, true}) {
    if (!factors_are_equal || !has_one_step(source, by_head) || !has_one_step(target, by_head)) continue;
    result.source = joined(source, by_head);
    result.target = joined(target, by_head);
    return result;
  }
  return result;
}

void convert_row(const LatentKernels& table, const LatentConversion& rows, int64_t source, int64_t target,
                 int64_t offset) {
  const LatentCache& to = rows.target;
  if (to.format == LatentFormat::Plain) {
    char* const row = to.latent + target * to.block_stride + offset * to.token_stride;
    return table.read_row(rows.source, source, offset, rows.source_factor, row, to.type);
  }
  float numbers[kLatentWidthMax];
  table.read_row(rows.source, source, offset, rows.source_factor, reinterpret_cast<char*>(numbers), Float::F32);
  const auto* latent = reinterpret_cast<const char*>(numbers);
  const LatentNumbers given{latent, Float::F32, latent + 4 * rows.source.latent_dim, Float::F32};
  table.write_row(to, target, offset, given, rows.target_factor);
}

// The pairs whose target no later pair writes.
std::vector<BlockPair> last_pairs(const std::vector<CopyRun>& runs) {
  std::vector<BlockPair> pairs;
  for (const CopyRun& run : runs) {
    for (int64_t i = 0; i < run.count; ++i) pairs.push_back({run.source + i, run.target + i});
  }
  std::unordered_map<int64_t, size_t> last;
  for (size_t i = 0; i < pairs.size(); ++i) last[pairs[i].target] = i;
  std::vector<BlockPair> kept;
  for (size_t i = 0; i < pairs.size(); ++i) {
    if (last[pairs[i].target] == i) kept.push_back(pairs[i]);
  }
  return kept;
}

}  // namespace

void convert_blocks(const std::vector<BlockConversion>& given, const std::vector<LatentConversion>& latents,
                    const PlannedMoves& copies, const Indices& source_ids, const Indices& target_ids,
                    int64_t num_threads, int64_t lowest) {
  const KernelTable& table = kernels();
  std::vector<BlockConversion> caches;
  for (const BlockConversion& each : given) caches.push_back(joined(each));
  int64_t sources = std::numeric_limits<int64_t>::max(), targets = sources, most = 0;
  double numbers = 0.0;  // of a pair
  for (const BlockConversion& each : caches) {
    sources = std::min(sources, each.source.num_blocks);
    targets = std::min(targets, each.target.num_blocks);
    most = std::max(most, each.source.block_size * each.source.dim);
    numbers += static_cast<double>(each.source.block_size * each.source.num_heads * each.source.dim);
  }
  for (const LatentConversion& each : latents) {
    sources = std::min(sources, each.source.num_blocks);
    targets = std::min(targets, each.target.num_blocks);
    numbers += static_cast<double>(each.source.block_size * (each.source.latent_dim + each.source.rope_dim));
  }
  std::vector<CopyRun> runs;
  list_pairs(source_ids, target_ids, sources, targets, lowest, runs);
  const std::vector<BlockPair> pairs = last_pairs(runs);
  const double us = numbers * static_cast<double>(pairs.size()) / kConvertedPerUs;
  const int64_t workers = std::min(worthwhile_threads(us, num_threads), std::max<int64_t>(1, std::ssize(pairs)));
  static thread_local ScratchBuffer memory;
  const int64_t each = (most + 1023) / 1024 * 1024;
  float* const scratch = memory.reserve(each * workers);
  parallel_for(std::ssize(pairs), workers, [&](int64_t i, int64_t worker) noexcept {
    const BlockPair& pair = pairs[static_cast<size_t>(i)];
    for (const BlockConversion& of : caches) {
      for (int64_t head = 0; head < of.source.num_heads; ++head) {
        convert_head(table, of, pair, head, scratch + worker * each);
      }
    }
    for (const LatentConversion& of : latents) {
      for (int64_t t = 0; t < of.source.block_size; ++t) convert_row(*table.latent, of, pair.source, pair.target, t);
    }
  });
  copies.run();
}

void convert_latent_rows(const LatentConversion& rows, int64_t num_threads) {
  const LatentKernels& table = *kernels().latent;
  const int64_t count = rows.source.num_blocks, width = rows.source.latent_dim + rows.source.rope_dim;
  const double us = static_cast<double>(count * width) / kConvertedPerUs;
  const int64_t workers = std::min(worthwhile_threads(us, num_threads), std::max<int64_t>(1, count));
  parallel_for(workers, workers, [&](int64_t unit, int64_t) noexcept {
    for (int64_t i = count * unit / workers; i < count * (unit + 1) / workers; ++i) convert_row(table, rows, i, i, 0);
  });
}

}  // namespace pagecore::cpu
