// Scores for sparse selection (Quest's bounds of blocks, labels of double sparsity), and the summaries of new keys.
#pragma once

#include "pagecore/ops/cpu/kernels/simd/convert.hpp"
#include "pagecore/ops/cpu/kernels/simd/lines.hpp"
#include "pagecore/ops/cpu/kernels/simd/math.hpp"
#include "pagecore/ops/cpu/select_args.hpp"

namespace pagecore::cpu::PC_ISA {
namespace {

// ---- queries

PC_FORCE_INLINE const char* query_row(const TokenArray& query, int64_t token, int64_t head) {
  return query.data + token * query.token_stride + head * query.head_stride;
}

// The query rows of a key head, split by sign so that sum max(q low, q high) is two products: rows [count, 2, stride],
// first max(q, 0), then min(q, 0). Returns count: the heads of the group, or 1 for their mean.
template <Float Q>
int64_t split_queries(const ScoreArgs& args, int64_t query, int64_t head, int64_t group, int64_t stride, float* rows) {
  const int64_t count = args.mean ? 1 : group;
  for (int64_t i = 0; i < 2 * count * stride; i += kLanes) store(rows + i, Vec{});
  for (int64_t g = 0; g < group; ++g) {
    float* to = rows + (args.mean ? 0 : 2 * g * stride);
    for_each_vector<Q>(query_row(args.query, query, head * group + g), args.query.dim,
                       [&](int64_t d, Vec q, int64_t) { store(to + d, load(to + d) + q); });
  }
  for (int64_t r = 0; r < count; ++r) {
    float* positive = rows + 2 * r * stride;
    for (int64_t d = 0; d < stride; d += kLanes) {
      const Vec q = args.mean ? load(positive + d) / static_cast<float>(group) : load(positive + d);
      store(positive + d, q > 0.0f ? q : Vec{});
      store(positive + stride + d, q > 0.0f ? Vec{} : q);
    }
  }
  return count;
}

// The query label of a key head, [stride]: for each channel the number of the group with the largest magnitude, the
// first of equals, or the mean.
template <Float Q>
void reduce_label(const ScoreArgs& args, int64_t query, int64_t head, int64_t group, int64_t stride, float* row) {
  const int32_t* channels = args.channels + head * args.high.dim;
  for (int64_t s = 0; s < stride; ++s) {
    float reduced = 0.0f;
    for (int64_t g = 0; s < args.high.dim && g < group; ++g) {
      const char* q = query_row(args.query, query, head * group + g) + channels[s] * kSize<Q>;
      const float x = load_tail<Q>(q, 1)[0];
      if (args.mean) {
        reduced += x;
      } else if (g == 0 || __builtin_fabsf(x) > __builtin_fabsf(reduced)) {
        reduced = x;
      }
    }
    row[s] = args.mean ? reduced / static_cast<float>(group) : reduced;
  }
}

// ---- scores

// The bound of one query row. A component of 0 contributes 0, whatever the bounds are; one of NaN makes the bound NaN.
template <Float K>
[[gnu::noinline, gnu::cold]] float bound_of_row(const float* row, int64_t stride, const char* low, const char* high,
                                                int64_t dim) {
  Vec added{};
  for_each_vector<K>(low, dim, [&](int64_t d, Vec least, int64_t n) {
    const char* at = high + d * kSize<K>;
    const Vec most = n == kLanes ? load_as_float<K>(at) : load_tail<K>(at, n);
    const Vec positive = load(row + d), negative = load(row + stride + d);
    added += positive > 0.0f ? positive * most : negative < 0.0f ? negative * least : negative;
  });
  return sum(added);
}

// The maximum bound of `count` query rows. A bound that is infinite makes the products of zeros NaN; such sums are
// computed again. Rows are multiplied four at a time; the last is repeated.
template <Float K>
float bound_of(const float* rows, int64_t count, int64_t stride, const char* low, const char* high, int64_t dim) {
  constexpr int kRows = 4;
  float best = -kInfinity;
  for (int64_t first = 0; first < count; first += kRows) {
    const float* row[kRows];
    for (int r = 0; r < kRows; ++r) row[r] = rows + 2 * stride * (first + r < count ? first + r : count - 1);
    Vec sums[kRows] = {};
    for_each_vector<K>(low, dim, [&](int64_t d, Vec least, int64_t n) __attribute__((always_inline)) {
      const char* at = high + d * kSize<K>;
      const Vec most = n == kLanes ? load_as_float<K>(at) : load_tail<K>(at, n);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        sums[r] = fma(load(row[r] + d), most, fma(load(row[r] + stride + d), least, sums[r]));
      }
    });
    const Vec4 bounds = sum_each(sums[0], sums[1], sums[2], sums[3]);
    for (int r = 0; r < kRows; ++r) {
      const float bound = bounds[r] == bounds[r] ? bounds[r] : bound_of_row<K>(row[r], stride, low, high, dim);
      best = bound > best ? bound : best;
    }
  }
  return best;
}

template <Float K>
float label_score(const float* row, const char* label, int64_t dim) {
  Vec added{};
  for_each_vector<K>(label, dim, [&](int64_t d, Vec v, int64_t) { added = fma(load(row + d), v, added); });
  return sum(added);
}

// Blocks of a table lie anywhere in memory, and the hardware does not prefetch from one to the next.
constexpr int64_t kScoredAhead = 2;

PC_FORCE_INLINE void prefetch_block(const ScoreArgs& args, int64_t id, int64_t head) {
  const Cache& high = args.high;
  prefetch_bytes(high.data + id * high.block_stride + head * high.head_stride, high.dim * size_of(high.type));
  if (args.low.data == nullptr) return;
  prefetch_bytes(args.low.data + id * args.low.block_stride + head * args.low.head_stride,
                 high.dim * size_of(high.type));
}

// Rows of the queries of a part: `count` for each head, `head_size` numbers apart.
struct ScoreRows {
  const float* data;
  int64_t head_size;
  int64_t count;
  int64_t stride;
};

// The heads of an entry are scored one after the other, because they are adjacent in most caches.
template <Float K>
void score_entries(const ScoreArgs& args, const ScorePart& part, const ScoreRows& rows) {
  const Cache& high = args.high;
  const Indices blocks = args.table.row(part.row);
  const int64_t end = part.end < part.visible ? part.end : part.visible;
  int64_t block = part.begin / high.block_size, within = part.begin - block * high.block_size;
  // The ids were checked; another thread may have changed them meanwhile.
  const auto id_of = [&](int64_t at) {
    const int64_t named = blocks.at(at);
    return named >= 0 && named < high.num_blocks ? named : 0;
  };
  float* out = args.scores + part.query * high.num_heads * args.width;
  const int64_t last = end > 0 ? (end - 1) / high.block_size : 0;
  for (int64_t i = part.begin; i < end; ++block, within = 0) {
    const int64_t id = id_of(block), ahead = block + kScoredAhead <= last ? id_of(block + kScoredAhead) : -1;
    for (bool is_first = true; i < end && within < high.block_size; ++i, ++within, is_first = false) {
      const char* top = high.data + id * high.block_stride + within * high.token_stride;
      const char* bottom = args.low.data + id * args.low.block_stride;
      for (int64_t head = part.head_begin; head < part.head_end; ++head) {
        if (is_first && ahead >= 0) prefetch_block(args, ahead, head);
        const float* row = rows.data + (head - part.head_begin) * rows.head_size;
        const char* at = top + head * high.head_stride;
        out[head * args.width + i] =
            args.low.data == nullptr
                ? label_score<K>(row, at, high.dim)
                : bound_of<K>(row, rows.count, rows.stride, bottom + head * args.low.head_stride, at, high.dim);
      }
    }
  }
  for (int64_t head = part.head_begin; head < part.head_end; ++head) {
    float* row = out + head * args.width;
    for (int64_t i = part.begin < end ? end : part.begin; i < part.end; ++i) row[i] = -kInfinity;
  }
}

// `scratch` has 2 * group * padded(dim) numbers for each head of the part.
inline void score(const ScoreArgs& args, const ScorePart& part, float* scratch) {
  const int64_t group = args.query.num_heads / args.high.num_heads, stride = padded(args.high.dim);
  ScoreRows rows{scratch, 2 * group * stride, 1, stride};
  with_float(args.query.type, [&]<Float Q>() {
    for (int64_t head = part.head_begin; head < part.head_end; ++head) {
      float* row = scratch + (head - part.head_begin) * rows.head_size;
      if (args.low.data == nullptr) {
        reduce_label<Q>(args, part.query, head, group, stride, row);
      } else {
        rows.count = split_queries<Q>(args, part.query, head, group, stride, row);
      }
    }
  });
  with_float(args.high.type, [&]<Float K>() { score_entries<K>(args, part, rows); });
}

// ---- summaries

// Consecutive new keys with consecutive slots of one block.
struct KeyRun {
  int64_t token;
  int64_t count;
  int64_t block;
  int64_t offset;
};

// Calls visit(run) for the runs of the slots in order. Slots outside the cache are skipped.
template <typename Visit>
PC_FORCE_INLINE void for_each_run(const SummaryArgs& args, Visit&& visit) {
  const auto size = static_cast<uint64_t>(args.block_size), num_slots = static_cast<uint64_t>(args.num_blocks) * size;
  const int shift = __builtin_ctzll(size);
  const bool is_power = uint64_t{1} << shift == size;
  for (int64_t token = 0; token < args.slots.size;) {
    const auto slot = static_cast<uint64_t>(args.slots.at(token));
    if (slot >= num_slots) {
      ++token;
      continue;
    }
    const auto block = static_cast<int64_t>(is_power ? slot >> shift : slot / size);
    const int64_t offset = static_cast<int64_t>(slot) - block * args.block_size;
    int64_t room = args.block_size - offset, count = 1;
    if (args.slots.size - token < room) room = args.slots.size - token;
    while (count < room && static_cast<uint64_t>(args.slots.at(token + count)) == slot + static_cast<uint64_t>(count)) {
      ++count;
    }
    visit(KeyRun{token, count, block, offset});
    token += count;
  }
}

// Extends the bounds of `n` numbers by those of `count` rows, or starts them with the first row. kWhole: n == kLanes.
template <Float From, Float To, bool kWhole>
PC_FORCE_INLINE void bound_vector(const char* row, int64_t stride, int64_t count, bool starts, char* low, char* high,
                                  int64_t n) {
  const auto key = [&](const char* at) __attribute__((always_inline)) {
    return kWhole ? load_as_float<From>(at) : load_tail<From>(at, n);
  };
  const auto old = [&](const char* at)
                       __attribute__((always_inline)) { return kWhole ? load_as_float<To>(at) : load_tail<To>(at, n); };
  Vec least = key(row), most = least;
  if (!starts) {
    const Vec before = old(low), after = old(high);
    most = least > after ? least : after;
    least = least < before ? least : before;
  }
  for (int64_t i = 1; i < count; ++i) {
    const Vec k = key(row + i * stride);
    least = k < least ? k : least;
    most = k > most ? k : most;
  }
  store_part<To>(low, 0, least, kWhole ? kLanes : n);
  store_part<To>(high, 0, most, kWhole ? kLanes : n);
}

// The first slot of a block starts its bounds anew.
template <Float From, Float To>
void bound_run(const SummaryArgs& args, const KeyRun& run, int64_t head) {
  char* low = args.low.data + run.block * args.low.block_stride + head * args.low.head_stride;
  char* high = args.high.data + run.block * args.high.block_stride + head * args.high.head_stride;
  const char* rows = args.key.data + run.token * args.key.token_stride + head * args.key.head_stride;
  const bool starts = run.offset == 0;
  const int64_t dim = args.key.dim, stride = args.key.token_stride;
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    bound_vector<From, To, true>(rows + d * kSize<From>, stride, run.count, starts, low + d * kSize<To>,
                                 high + d * kSize<To>, kLanes);
  }
  if (d < dim) {
    bound_vector<From, To, false>(rows + d * kSize<From>, stride, run.count, starts, low + d * kSize<To>,
                                  high + d * kSize<To>, dim - d);
  }
}

template <Float From, Float To>
void label_run(const SummaryArgs& args, const KeyRun& run, int64_t head) {
  const int32_t* channels = args.channels + head * args.label.dim;
  for (int64_t i = 0; i < run.count; ++i) {
    const char* row = args.key.data + (run.token + i) * args.key.token_stride + head * args.key.head_stride;
    char* to = args.label.data + run.block * args.label.block_stride + (run.offset + i) * args.label.token_stride +
               head * args.label.head_stride;
    for (int64_t s = 0; s < args.label.dim; ++s) {
      store_part<To>(to, s, load_tail<From>(row + channels[s] * kSize<From>, 1), 1);
    }
  }
}

// Summarises the new keys of heads head_begin .. head_end.
inline void summarise(const SummaryArgs& args, int64_t head_begin, int64_t head_end) {
  with_float(args.key.type, [&]<Float From>() {
    if (args.low.data != nullptr) {
      with_float(args.low.type, [&]<Float To>() {
        for_each_run(args, [&](const KeyRun& run) {
          for (int64_t head = head_begin; head < head_end; ++head) bound_run<From, To>(args, run, head);
        });
      });
    }
    if (args.label.data != nullptr) {
      with_float(args.label.type, [&]<Float To>() {
        for_each_run(args, [&](const KeyRun& run) {
          for (int64_t head = head_begin; head < head_end; ++head) label_run<From, To>(args, run, head);
        });
      });
    }
  });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
