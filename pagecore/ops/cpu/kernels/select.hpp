// Scores for sparse selection (Quest's bounds of blocks, labels of double sparsity), and the summaries of new keys.
#pragma once

#include "pagecore/ops/cpu/kernels/convert.hpp"
#include "pagecore/ops/cpu/kernels/math.hpp"
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
int64_t split_queries(const ScoreArgs& args, const ScorePart& part, int64_t group, int64_t stride, float* rows) {
  const int64_t count = args.mean ? 1 : group;
  for (int64_t i = 0; i < 2 * count * stride; i += kLanes) store(rows + i, Vec{});
  for (int64_t g = 0; g < group; ++g) {
    float* to = rows + (args.mean ? 0 : 2 * g * stride);
    for_each_vector<Q>(query_row(args.query, part.query, part.head * group + g), args.query.dim,
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
void reduce_label(const ScoreArgs& args, const ScorePart& part, int64_t group, int64_t stride, float* row) {
  const int32_t* channels = args.channels + part.head * args.high.dim;
  for (int64_t s = 0; s < stride; ++s) {
    float reduced = 0.0f;
    for (int64_t g = 0; s < args.high.dim && g < group; ++g) {
      const char* q = query_row(args.query, part.query, part.head * group + g) + channels[s] * kSize<Q>;
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

template <Float K>
float bound_of(const float* rows, int64_t count, int64_t stride, const char* low, const char* high, int64_t dim) {
  float best = -kInfinity;
  for (int64_t r = 0; r < count; r += 2) {
    const float* a = rows + 2 * r * stride;
    const float* b = r + 1 < count ? a + 2 * stride : a;
    Vec sum_a{}, sum_b{};
    for_each_vector<K>(low, dim, [&](int64_t d, Vec least, int64_t n) {
      const char* at = high + d * kSize<K>;
      const Vec most = n == kLanes ? load_as_float<K>(at) : load_tail<K>(at, n);
      sum_a = fma(load(a + d), most, fma(load(a + stride + d), least, sum_a));
      sum_b = fma(load(b + d), most, fma(load(b + stride + d), least, sum_b));
    });
    const float x = sum(sum_a), y = sum(sum_b);
    const float both = x > y ? x : y;
    best = both > best ? both : best;
  }
  return best;
}

template <Float K>
float label_score(const float* row, const char* label, int64_t dim) {
  Vec added{};
  for_each_vector<K>(label, dim, [&](int64_t d, Vec v, int64_t) { added = fma(load(row + d), v, added); });
  return sum(added);
}

template <Float K>
void score_entries(const ScoreArgs& args, const ScorePart& part, const float* rows, int64_t count, int64_t stride,
                   float* out) {
  const Cache& high = args.high;
  const Indices blocks = args.table.row(part.row);
  const int64_t end = part.end < part.visible ? part.end : part.visible;
  int64_t block = part.begin / high.block_size, within = part.begin - block * high.block_size;
  for (int64_t i = part.begin; i < end; ++block, within = 0) {
    // The ids were checked; another thread may have changed them meanwhile.
    const int64_t named = blocks.at(block);
    const int64_t id = named >= 0 && named < high.num_blocks ? named : 0;
    for (; i < end && within < high.block_size; ++i, ++within) {
      const char* top = high.data + id * high.block_stride + within * high.token_stride + part.head * high.head_stride;
      if (args.low.data == nullptr) {
        out[i] = label_score<K>(rows, top, high.dim);
      } else {
        const char* bottom = args.low.data + id * args.low.block_stride + part.head * args.low.head_stride;
        out[i] = bound_of<K>(rows, count, stride, bottom, top, high.dim);
      }
    }
  }
  for (int64_t i = part.begin < end ? end : part.begin; i < part.end; ++i) out[i] = -kInfinity;
}

// `rows` is scratch for 2 * group * padded(dim) numbers.
inline void score(const ScoreArgs& args, const ScorePart& part, float* rows) {
  const int64_t group = args.query.num_heads / args.high.num_heads, stride = padded(args.high.dim);
  float* out = args.scores + (part.query * args.high.num_heads + part.head) * args.width;
  int64_t count = 1;
  with_float(args.query.type, [&]<Float Q>() {
    if (args.low.data == nullptr) {
      reduce_label<Q>(args, part, group, stride, rows);
    } else {
      count = split_queries<Q>(args, part, group, stride, rows);
    }
  });
  with_float(args.high.type, [&]<Float K>() { score_entries<K>(args, part, rows, count, stride, out); });
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
  const auto num_slots = static_cast<uint64_t>(args.num_blocks * args.block_size);
  for (int64_t token = 0; token < args.slots.size;) {
    const auto slot = static_cast<uint64_t>(args.slots.at(token));
    if (slot >= num_slots) {
      ++token;
      continue;
    }
    const int64_t block = static_cast<int64_t>(slot) / args.block_size;
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

template <Float From, Float To>
void bound_run(const SummaryArgs& args, const KeyRun& run, int64_t head) {
  char* low = args.low.data + run.block * args.low.block_stride + head * args.low.head_stride;
  char* high = args.high.data + run.block * args.high.block_stride + head * args.high.head_stride;
  const char* rows = args.key.data + run.token * args.key.token_stride + head * args.key.head_stride;
  for (int64_t d = 0; d < args.key.dim; d += kLanes) {
    const int64_t n = args.key.dim - d < kLanes ? args.key.dim - d : kLanes;
    const auto at = [&](int64_t i) __attribute__((always_inline)) {
      const char* row = rows + i * args.key.token_stride + d * kSize<From>;
      return n == kLanes ? load_as_float<From>(row) : load_tail<From>(row, n);
    };
    const auto old = [&](const char* bound) __attribute__((always_inline)) {
      return n == kLanes ? load_as_float<To>(bound + d * kSize<To>) : load_tail<To>(bound + d * kSize<To>, n);
    };
    // The first slot of a block starts its bounds anew.
    Vec least = run.offset == 0 ? at(0) : old(low), most = run.offset == 0 ? least : old(high);
    for (int64_t i = run.offset == 0 ? 1 : 0; i < run.count; ++i) {
      const Vec k = at(i);
      least = k < least ? k : least;
      most = k > most ? k : most;
    }
    store_part<To>(low, d, least, n);
    store_part<To>(high, d, most, n);
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

// Summarises the new keys of one head.
inline void summarise(const SummaryArgs& args, int64_t head) {
  with_float(args.key.type, [&]<Float From>() {
    if (args.low.data != nullptr) {
      with_float(args.low.type, [&]<Float To>() {
        for_each_run(args, [&](const KeyRun& run) { bound_run<From, To>(args, run, head); });
      });
    }
    if (args.label.data != nullptr) {
      with_float(args.label.type, [&]<Float To>() {
        for_each_run(args, [&](const KeyRun& run) { label_run<From, To>(args, run, head); });
      });
    }
  });
}

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
