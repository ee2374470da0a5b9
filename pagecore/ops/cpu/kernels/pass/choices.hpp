// The choices of a pass: what it decides before its first tile about products with keys and values.
//
// With few query rows, keys and values are read in place. With many rows, a mask, or a head dim that is not a multiple
// of the vector width, the tile is packed first. Values are always packed for AMX and for tiles in which rows attend to
// different keys.
//
// Products with a packed tile give each row the same bits regardless of the other rows, so batch-invariant calls always
// pack.
#pragma once

#include "pagecore/ops/cpu/kernels/cache_rows.hpp"
#include "pagecore/ops/cpu/kernels/products/packed.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// From this number of rows on, packing a tile costs less than it saves.
constexpr int64_t kPackRows = 16;
static_assert(kPackRows <= kDecodeRows, "AMX must serve every row count that is not packed");

// The choices for `rows` query rows of a key head.
struct PassChoices {
  bool pairs;     // queries, keys, values and output are bfloat16, multiplied in pairs
  bool integers;  // the codes of quantised keys and values may be multiplied as integers
  CodeProducts key_products;
  CodeProducts value_products;
  bool packed;           // every tile is packed first
  bool by_amx;           // AMX reads keys in place, or unpacked; values are packed
  int64_t query_stride;  // of a row of queries in scratch memory

  PassChoices(const AttentionArgs& args, const AttentionBatch& batch, int64_t rows);

  // Keys and values are read in place.
  [[nodiscard]] bool in_place() const { return !packed && !by_amx; }
};

// True if the call multiplies pairs of bfloat16. Softmax weights are then rounded to bfloat16, as the output is.
inline bool takes_pairs(const AttentionArgs& args, const AttentionBatch& batch) {
  return kHasPairs && batch.multiplies_pairs && batch.sealed_lens == nullptr && args.query.type == Float::BF16 &&
         number_type(args.key) == Float::BF16 && number_type(args.value) == Float::BF16 && args.out.type == Float::BF16;
}

// Products with the codes of keys or values. Integers are rounded relative to the largest number of a row (see
// docs/formats.md), which calls with float32 do not accept.
inline bool multiplies_codes(const AttentionBatch& batch, int64_t rows) {
  return !batch.invariant && rows <= kCodeRows;
}
inline bool multiplies_integers(const AttentionArgs& args, const AttentionBatch& batch, int64_t rows) {
  return multiplies_codes(batch, rows) && args.query.type != Float::F32 && args.out.type != Float::F32;
}

inline PassChoices::PassChoices(const AttentionArgs& args, const AttentionBatch& batch, int64_t rows) {
  const bool takes = takes_pairs(args, batch), code_pairs = has_code_pairs(args.key) && has_code_pairs(args.value);
  integers = multiplies_integers(args, batch, rows);
  const auto products = [&](const Cache& cache) {
    if (!multiplies_codes(batch, rows) || (kHasAmx && takes)) return CodeProducts::None;
    return products_of(cache, takes && code_pairs, integers);
  };
  const auto in_pairs = [](CodeProducts of) { return of == CodeProducts::None || of == CodeProducts::Pairs; };
  key_products = products(args.key);
  value_products = products(args.value);
  pairs = takes && in_pairs(key_products) && in_pairs(value_products);
  const auto is_whole = [&](const Cache& cache) { return cache.dim % (pairs ? 2 * kLanes : kLanes) == 0; };
  const auto reads_codes = [&](const Cache& cache, CodeProducts of) {
    return (pairs && packs_codes(cache)) || of != CodeProducts::None;
  };
  packed = reads_codes(args.key, key_products) || reads_codes(args.value, value_products) || batch.invariant ||
           rows >= kPackRows || args.mask != nullptr || !is_whole(args.key) || !is_whole(args.value);
  by_amx =
      kHasAmx && pairs && (is_plain(args.key) ? !packed && batch.from_cache : !batch.invariant && rows < kPackRows);
  query_stride = pairs                                  ? pair_padded(args.key.dim)
                 : key_products == CodeProducts::Floats ? unpacked_stride(args.key.dim)
                                                        : padded(args.key.dim);
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
