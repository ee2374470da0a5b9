// Launch parameters of the data-moving CUDA kernels: each byte is moved by exactly one unit, units are aligned for
// vector accesses, and the pairs of one wave are independent. No kernel runs, and no address is read.
#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "pagecore/ops/cuda/moves/merge_launch.hpp"
#include "pagecore/ops/cuda/moves/move_launch.hpp"
#include "pagecore/ops/cuda/moves/write_launch.hpp"
#include "tests/native/harness.hpp"

using namespace pagecore;
using namespace pagecore::test;
using namespace pagecore::cuda;

namespace {

int64_t divide(int64_t n, const PcDivisor& by) {
  return static_cast<int64_t>((static_cast<uint64_t>(n) * by.multiplier) >> (31 + by.shift));
}

// Offsets of the moved bytes from the start of a block, in source and target.
using Bytes = std::set<std::pair<int64_t, int64_t>>;

struct Axis {
  int64_t size, source, target;
};

void add_bytes(Bytes& bytes, const std::vector<Axis>& axes, size_t depth, int64_t source, int64_t target) {
  if (depth == axes.size()) {
    bytes.emplace(source, target);
    return;
  }
  const Axis& axis = axes[depth];
  for (int64_t i = 0; i < axis.size; ++i) {
    add_bytes(bytes, axes, depth + 1, source + i * axis.source, target + i * axis.target);
  }
}

char* address(int64_t value) { return reinterpret_cast<char*>(static_cast<uintptr_t>(value)); }

// Axes of a block in any memory order, with gaps, padding and negative strides.
std::vector<int64_t> strides_of(Random& random, const std::vector<int64_t>& shape, int64_t itemsize) {
  std::vector<size_t> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  if (random.one_in(2)) random.shuffle(order);
  std::vector<int64_t> strides(shape.size());
  int64_t next = itemsize;
  for (size_t i = order.size(); i > 0; --i) {
    strides[order[i - 1]] = next * (random.one_in(8) ? -1 : 1);
    next *= shape[order[i - 1]];
    if (random.one_in(4)) next += itemsize * random.between(1, 9);
  }
  return strides;
}

BlockArray array_of(Random& random, const std::vector<int64_t>& shape, int32_t dtype, int64_t itemsize) {
  const std::vector<int64_t> strides = strides_of(random, shape, itemsize);
  BlockArray array;
  array.data = address((int64_t{1} << 40) + itemsize * random.pick({0, 0, 0, 1, 2, 4, 8}));
  array.dtype = dtype;
  array.itemsize = itemsize;
  array.num_blocks = random.pick({1, 9, 9});
  array.ndim = static_cast<int32_t>(shape.size()) - 1;
  array.block_stride = strides[0];
  std::copy_n(shape.begin() + 1, array.ndim, array.shape);
  std::copy_n(strides.begin() + 1, array.ndim, array.strides);
  return array;
}

struct Types {
  int32_t from, to;
  int64_t from_size, to_size;
};

Types any_types(Random& random) {
  if (random.one_in(2)) {
    const int64_t size = random.pick({1, 2, 4, 8});
    return {6, 6, size, size};
  }
  const auto from = random.pick({Float::F32, Float::F16, Float::BF16});
  const auto to = random.pick({Float::F32, Float::F16, Float::BF16});
  return {static_cast<int32_t>(from), static_cast<int32_t>(to), size_of(from), size_of(to)};
}

// Checks the units first .. end - 1 of a plan; adds their bytes, or their elements if they are converted.
Bytes bytes_of_units(const MovePlan& plan, int64_t end, uint64_t source_bits, uint64_t target_bits,
                     const Types& types) {
  const bool casts = plan.types.from != kBytes;
  const int64_t from_size = casts ? types.from_size : 1, to_size = casts ? types.to_size : 1;
  const PcMoveShape& shape = plan.shape;
  PC_CHECK(shape.unit == 1 || shape.unit == 2 || shape.unit == 4 || shape.unit == 8 || (!casts && shape.unit == 16),
           "a unit has ", shape.unit, " elements");
  Bytes bytes;
  for (int64_t number = 0; number < end; ++number) {
    int64_t rest = number, source = 0, target = 0;
    for (int i = shape.num_axes - 1; i > 0; --i) {
      const int64_t outer = divide(rest, shape.axes[i].size), along = rest - outer * shape.axes[i].size.divisor;
      source += along * shape.axes[i].source_stride;
      target += along * shape.axes[i].target_stride;
      rest = outer;
    }
    source += rest * shape.axes[0].source_stride;
    target += rest * shape.axes[0].target_stride;
    PC_CHECK(allows(source_bits + static_cast<uint64_t>(source), shape.unit * from_size), "a source is not aligned");
    PC_CHECK(allows(target_bits + static_cast<uint64_t>(target), shape.unit * to_size), "a target is not aligned");
    for (int64_t i = 0; i < shape.unit; ++i) {
      PC_CHECK(bytes.emplace(source + i * from_size, target + i * to_size).second, "an element moves twice");
    }
  }
  return bytes;
}

std::vector<int64_t> any_shape(Random& random, size_t least) {
  std::vector<int64_t> shape;
  for (int64_t i = random.between(static_cast<int64_t>(least), 5); i > 0; --i) {
    shape.push_back(random.pick({1, 1, 2, 3, 4, 5, 8}));
  }
  if (random.one_in(2)) shape.back() = random.pick({16, 20, 32, 64});
  return shape;
}

PC_TEST(divisors_divide_everything_below_two_to_the_31) {
  rounds(20'000, [](Random& random) {
    const int64_t most = (int64_t{1} << 31) - 1, near = int64_t{1} << random.between(0, 30);
    const int64_t by = random.pick({random.between(1, 300), random.between(1, most), near, near + 1, most});
    const PcDivisor divisor = make_divisor(by);
    for (const int64_t n : {int64_t{0}, by - 1, by, most, most / by * by, std::max<int64_t>(most / by * by - 1, 0),
                            random.between(0, most), random.between(0, most)}) {
      PC_CHECK(divide(n, divisor) == n / by, n, " / ", by, " came out as ", divide(n, divisor));
    }
  });
}

PC_TEST(every_element_of_a_block_is_in_one_unit) {
  rounds(4'000, [](Random& random) {
    const Types types = any_types(random);
    const std::vector<int64_t> shape = any_shape(random, 1);
    const BlockArray source = array_of(random, shape, types.from, types.from_size);
    const BlockArray target = array_of(random, shape, types.to, types.to_size);
    const MovePlan plan = plan_blocks(source, target);
    std::vector<Axis> axes;
    for (int i = 0; i < source.ndim; ++i) axes.push_back({source.shape[i], source.strides[i], target.strides[i]});
    if (plan.types.from == kBytes) axes.push_back({types.from_size, 1, 1});
    Bytes expected;
    add_bytes(expected, axes, 0, 0, 0);
    const Bytes found = bytes_of_units(plan, plan.shape.num_units, internal::address_bits(source),
                                       internal::address_bits(target), types);
    PC_CHECK(found == expected, found.size(), " elements move and ", expected.size(), " are to");
  });
}

PC_TEST(any_number_of_tokens_is_a_whole_number_of_units_from_the_first_on) {
  rounds(4'000, [](Random& random) {
    const Types types = any_types(random);
    std::vector<int64_t> shape = any_shape(random, 2);
    const bool gathers = random.one_in(2);
    const BlockArray cache = array_of(random, shape, types.from, types.from_size);
    shape.erase(shape.begin());
    const BlockArray packed = array_of(random, shape, types.to, types.to_size);
    const MovePlan plan = plan_tokens(cache, packed, gathers);
    const Types sides = gathers ? types : Types{types.to, types.from, types.to_size, types.from_size};
    const BlockArray &from = gathers ? cache : packed, &to = gathers ? packed : cache;
    const int64_t tokens = random.between(0, cache.shape[0]);
    std::vector<Axis> axes{
        {tokens, gathers ? cache.strides[0] : packed.block_stride, gathers ? packed.block_stride : cache.strides[0]}};
    for (int i = 1; i < cache.ndim; ++i) {
      const int64_t paged = cache.strides[i], row = packed.strides[i - 1];
      axes.push_back({cache.shape[i], gathers ? paged : row, gathers ? row : paged});
    }
    if (plan.types.from == kBytes) axes.push_back({types.from_size, 1, 1});
    Bytes expected;
    add_bytes(expected, axes, 0, 0, 0);
    const Bytes found = bytes_of_units(plan, tokens * plan.shape.units_per_token, internal::address_bits(from),
                                       internal::address_bits(to), sides);
    PC_CHECK(found == expected, found.size(), " elements move and ", expected.size(), " are to");
  });
}

PC_TEST(layouts_that_engines_have_move_in_vectors) {
  const auto array = [](std::vector<int64_t> shape, std::vector<int64_t> strides) {
    BlockArray made;
    made.data = address(int64_t{1} << 40);
    made.dtype = 2;
    made.itemsize = 2;
    made.num_blocks = shape[0];
    made.block_stride = strides[0];
    made.ndim = static_cast<int32_t>(shape.size()) - 1;
    std::copy_n(shape.begin() + 1, made.ndim, made.shape);
    std::copy_n(strides.begin() + 1, made.ndim, made.strides);
    return made;
  };
  // Bytes of [blocks, 16, 8, 128] of 16 bits.
  const BlockArray nhd = array({99, 16, 8, 128}, {32768, 2048, 256, 2}),
                   hnd = array({99, 16, 8, 128}, {32768, 256, 4096, 2});
  const BlockArray packed = array({999, 8, 128}, {2048, 256, 2});
  const auto check = [](const MovePlan& plan, int num_axes, int unit) {
    PC_CHECK(plan.shape.num_axes == num_axes && plan.shape.unit == unit, plan.shape.num_axes, " axes of units of ",
             plan.shape.unit);
  };
  check(plan_blocks(nhd, nhd), 1, 16);
  check(plan_blocks(hnd, hnd), 1, 16);
  check(plan_blocks(hnd, nhd), 3, 16);
  check(plan_tokens(nhd, packed, true), 1, 16);
  check(plan_tokens(hnd, packed, true), 3, 16);
  check(plan_tokens(hnd, packed, false), 3, 16);
}

PC_TEST(pairs_of_a_wave_are_independent) {
  rounds(3'000, [](Random& random) {
    const bool one_cache = random.one_in(2);
    const int64_t blocks = random.pick({2, 10, 100, 3000}), count = random.pick({0, 1, 7, 40, 300});
    BlockPairs pairs;
    for (int64_t i = 0; i < count; ++i) {
      pairs.sources.push_back(random.below(blocks));
      pairs.targets.push_back((pairs.sources.back() + random.between(1, blocks - 1)) % blocks);
    }
    int64_t at = 0;
    for (const PairRun& run : runs_of(pairs, one_cache)) {
      PC_CHECK(run.begin == at && run.end > run.begin && run.end - run.begin <= PC_MAX_PAIRS, "pairs ", run.begin,
               " to ", run.end, " after ", at);
      at = run.end;
      if (run.ordered) continue;
      std::set<int64_t> read, written;
      for (int64_t i = run.begin; i < run.end; ++i) {
        const int64_t source = pairs.sources[static_cast<size_t>(i)], target = pairs.targets[static_cast<size_t>(i)];
        PC_CHECK(written.count(target) == 0, "block ", target, " is written twice");
        PC_CHECK(!one_cache || (read.count(target) == 0 && written.count(source) == 0), "pair ", i, " meets another");
        read.insert(source);
        written.insert(target);
      }
    }
    PC_CHECK(at == count, at, " of ", count, " pairs");
  });
}

PC_TEST(chains_run_in_order_and_independent_pairs_in_waves) {
  const auto runs = [](std::vector<int64_t> sources, std::vector<int64_t> targets) {
    BlockPairs pairs;
    pairs.sources = std::move(sources);
    pairs.targets = std::move(targets);
    return runs_of(pairs, true);
  };
  std::vector<int64_t> numbers(200), next(200);
  std::iota(numbers.begin(), numbers.end(), 0);
  std::iota(next.begin(), next.end(), 1);
  const std::vector<PairRun> chain = runs(numbers, next);
  PC_CHECK(chain.size() == 2 && chain[0].ordered && chain[1].ordered && chain[0].end == PC_MAX_PAIRS, chain.size());
  std::iota(next.begin(), next.end(), 1000);
  const std::vector<PairRun> apart = runs(numbers, next);
  PC_CHECK(apart.size() == 2 && !apart[0].ordered && !apart[1].ordered, apart.size());
  const std::vector<PairRun> two = runs({1, 2}, {2, 3});
  PC_CHECK(two.size() == 2 && !two[0].ordered && two[1].begin == 1, two.size());
}

PC_TEST(arrays_of_equal_layout_share_launches) {
  Random random(1);
  std::vector<BlockArray> arrays;
  for (int i = 0; i < 300; ++i) {
    BlockArray array;
    array.data = address((int64_t{1} << 40) + (i << 20) + (i % 3 == 2 ? 8 : 0));  // a third has a smaller alignment
    array.itemsize = 2;
    array.dtype = 1;
    array.num_blocks = 40 + i;
    array.block_stride = 64 * (i % 3 == 1 ? 2 : 1);
    array.ndim = 1;
    array.shape[0] = 32;
    array.strides[0] = 2;
    arrays.push_back(array);
  }
  BlockPairs pairs;
  pairs.sources = {1, 2, 3};
  pairs.targets = {4, 5, 6};
  const std::vector<PairLaunch> launches = pair_launches(arrays, arrays, pairs, true, 132);
  PC_CHECK(launches.size() == 3, launches.size(), " launches of three groups of 100");
  std::set<pc_address> seen;
  for (const PairLaunch& launch : launches) {
    PC_CHECK(launch.grid.y == 3 && launch.grid.z == 100, launch.grid.y, " pairs and ", launch.grid.z, " arrays");
    PC_CHECK(launch.params.num_source_blocks == 40 && launch.params.num_target_blocks == 40, "of the smallest array");
    PC_CHECK(launch.grid.x * kThreads * launch.params.units_per_thread >= launch.params.shape.num_units,
             "a short grid");
    for (int64_t i = 0; i < launch.grid.z; ++i) {
      PC_CHECK(launch.params.sources[i] == launch.params.targets[i], "two arrays");
      seen.insert(launch.params.sources[i]);
    }
  }
  PC_CHECK(seen.size() == 300, seen.size(), " arrays");
  arrays.resize(3);
  for (int i = 0; i < 247; ++i) arrays.push_back(arrays[0]);
  PC_CHECK(pair_launches(arrays, arrays, pairs, true, 132).size() == 5, "248 arrays take three launches");
}

PC_TEST(independent_pairs_on_the_device_share_out_the_grid_and_others_do_not) {
  rounds(1'000, [](Random& random) {
    BlockArray array;
    array.data = address(int64_t{1} << 40);
    array.itemsize = 1;
    array.dtype = 6;
    array.num_blocks = 9;
    array.ndim = 1;
    array.shape[0] = random.pick({1, 64, 32768, 1 << 20});
    array.strides[0] = 1;
    array.block_stride = array.shape[0];
    const std::vector<BlockArray> arrays(static_cast<size_t>(random.between(1, PC_MAX_ARRAYS)), array);
    const int64_t count = random.pick({int64_t{1}, random.between(1, 5000), int64_t{INT32_MAX}});
    const Indices ids{address(int64_t{1} << 41), count, 8, false};
    const bool one_cache = random.one_in(2), independent = random.one_in(2);
    const auto launches = pair_launches(arrays, arrays, device_pairs(ids, ids, independent), one_cache, 132);
    PC_CHECK(launches.size() == 1, launches.size(), " launches");
    const PairLaunch& launch = launches[0];
    PC_CHECK(launch.params.ordered == !independent && launch.params.one_cache == one_cache, "the flags");
    PC_CHECK(launch.params.num_pairs == count, launch.params.num_pairs, " pairs");
    const int64_t others = launch.grid.x * launch.grid.z, rows = launch.grid.y;
    PC_CHECK(others * kThreads * launch.params.units_per_thread >= launch.params.shape.num_units, "a short grid");
    if (!independent) {
      PC_CHECK(rows == 1, rows, " rows for pairs in order");
    } else {
      PC_CHECK(rows >= 1 && rows <= std::min<int64_t>(count, 65535), rows, " rows");
      PC_CHECK(rows == count || (rows + 1) * others > 1 << 15, rows, " rows of ", others, " blocks of threads");
    }
  });
}

// Checks that launches take tokens 0 .. count - 1 in turn, each with numbers of units that fit.
template <typename Launch, typename TokensOf>
void check_turns(const std::vector<Launch>& launches, int64_t count, TokensOf&& tokens_of) {
  int64_t token = 0;
  for (const Launch& launch : launches) token += tokens_of(launch, token);
  PC_CHECK(token == count, token, " of ", count, " tokens");
}

PC_TEST(more_units_than_a_launch_counts_are_written_in_turns) {
  rounds(500, [](Random& random) {
    const int64_t heads = random.pick({1, 8, 128}), dim = random.pick({64, 100, 128}),
                  tokens = random.between(1, 1 << 30);
    WriteArgs args;
    for (TokenArray* rows : {&args.key, &args.value}) {
      rows->data = address(int64_t{1} << 40);
      rows->type = Float::BF16;
      rows->num_tokens = tokens;
      rows->num_heads = heads;
      rows->dim = dim;
      rows->head_stride = 2 * dim;
      rows->token_stride = 2 * dim * heads;
    }
    for (Cache* cache : {&args.key_cache, &args.value_cache}) {
      *cache = {address(int64_t{1} << 42), Float::BF16, 1 << 20,       16, heads, dim, 32 * heads * dim,
                2 * heads * dim,           2 * dim,     Format::Plain, {}};
    }
    if (random.one_in(2)) args.value_cache.head_stride *= 2;
    args.slots = {address(int64_t{1} << 41), tokens, random.pick({4, 8}), false};
    check_turns(write_launches(args, {}, {}, 132), tokens, [&](const WriteLaunch& launch, int64_t token) {
      const PcWriteParams& params = launch.params;
      const int64_t size = params.slots.size;
      PC_CHECK(params.slots.data == static_cast<pc_address>((int64_t{1} << 41) + token * args.slots.stride),
               "the slots");
      for (const PcWritePlane& plane : params.planes) {
        PC_CHECK(plane.rows.data == static_cast<pc_address>((int64_t{1} << 40) + token * args.key.token_stride),
                 "rows");
        PC_CHECK(plane.num_units == size * plane.units_per_token.divisor && plane.num_units <= kMaxUnits, "units");
        PC_CHECK(plane.units_per_token.divisor * plane.unit == heads * dim, "a token's units");
        PC_CHECK(launch.grid.x * kThreads * params.units_per_thread >= plane.num_units, "a short grid");
      }
      return size;
    });
  });
}

PC_TEST(more_rows_than_a_launch_counts_are_merged_in_turns) {
  rounds(500, [](Random& random) {
    const int64_t heads = random.pick({1, 7, 128}), dim = random.pick({1, 20, 64, 128, 520});
    const int64_t tokens = random.between(1, 1 << 30);
    MergeArgs args;
    args.mask = address(int64_t{1} << 42);
    args.mask_stride = 3;
    for (TokenArray* rows : {&args.out_a, &args.out_b, &args.out}) {
      *rows = {address(int64_t{1} << 40), Float::F16, tokens, heads, dim, 2 * dim * heads, 2 * dim};
    }
    for (Lse* lse : {&args.lse_a, &args.lse_b, &args.lse}) {
      *lse = {address(int64_t{1} << 41), tokens, 4 * heads, 4};
    }
    check_turns(merge_launches(args), tokens, [&](const MergeLaunch& launch, int64_t token) {
      const PcMergeParams& params = launch.params.merge;
      PC_CHECK(launch.params.mask == static_cast<pc_address>((int64_t{1} << 42) + token * 3), "mask");
      PC_CHECK(params.out.data == static_cast<pc_address>((int64_t{1} << 40) + token * args.out.token_stride), "out");
      PC_CHECK(params.lse.data == static_cast<pc_address>((int64_t{1} << 41) + token * 4 * heads), "lse");
      PC_CHECK(params.num_rows % heads == 0 && params.unit * params.units_per_row == dim, "rows of ", params.unit);
      const int64_t lanes = int64_t{params.num_rows} << params.lanes_shift;
      PC_CHECK(lanes <= kMaxUnits && launch.grid.x * kThreads >= lanes && params.lanes_shift <= 5, lanes, " lanes");
      PC_CHECK((1 << params.lanes_shift) >= std::min(params.units_per_row, 32), "lanes for ", params.units_per_row);
      return params.num_rows / heads;
    });
  });
}

PC_TEST(more_rows_of_many_parts_than_a_launch_counts_are_merged_in_turns) {
  rounds(500, [](Random& random) {
    const int64_t heads = random.pick({1, 7, 128}), dim = random.pick({1, 20, 64, 128, 520});
    const int64_t tokens = random.between(1, 1 << 30), row = 2 * dim * heads;
    const bool is_ragged = random.one_in(2);
    MergeManyArgs args;
    args.parts = {address(int64_t{1} << 40), Float::F16, 3, heads, dim, row, 2 * dim};
    args.lses = {address(int64_t{1} << 41), 3, 4 * heads, 4};
    args.out = {address(int64_t{1} << 43), Float::F16, tokens, heads, dim, row, 2 * dim};
    args.lse = {address(int64_t{1} << 44), tokens, 4 * heads, 4};
    if (is_ragged) {
      args.cu_parts = {address(int64_t{1} << 42), tokens + 1, 16, true};
    } else {
      args.token_stride = 3 * row;
      args.lse_token_stride = 12 * heads;
    }
    check_turns(merge_many_launches(args), tokens, [&](const MergeManyLaunch& launch, int64_t token) {
      const PcMergeManyParams& params = launch.params;
      const auto at = [](int64_t base, int64_t offset) {
        return static_cast<pc_address>((int64_t{1} << base) + offset);
      };
      PC_CHECK(params.parts.data == at(40, token * args.token_stride), "parts");
      PC_CHECK(params.lses.data == at(41, token * args.lse_token_stride), "lse of the parts");
      PC_CHECK(params.cu_parts.data == (is_ragged ? at(42, token * 16) : 0), "cu_parts");
      PC_CHECK(params.out.data == at(43, token * row) && params.lse.data == at(44, token * 4 * heads), "results");
      PC_CHECK(params.num_rows % heads == 0 && params.unit * params.units_per_row == dim, "rows of ", params.unit);
      const int64_t lanes = int64_t{params.num_rows} << params.lanes_shift;
      PC_CHECK(lanes <= kMaxUnits && launch.grid.x * kThreads >= lanes && params.lanes_shift <= 5, lanes, " lanes");
      return params.num_rows / heads;
    });
  });
}

PC_TEST(more_parts_than_a_kernel_counts_are_refused) {
  MergeManyArgs args;
  args.parts = {address(int64_t{1} << 40), Float::F16, 0, 1, 8, 16, 16};
  args.lses = {address(int64_t{1} << 41), 0, 4, 4};
  args.out = {address(int64_t{1} << 43), Float::F16, 1, 1, 8, 16, 16};
  args.lse = {address(int64_t{1} << 44), 1, 4, 4};
  args.parts.num_tokens = args.lses.num_tokens = kMaxUnits;
  PC_CHECK(merge_many_launches(args).front().params.num_parts == kMaxUnits, "parts");
  args.parts.num_tokens = args.lses.num_tokens = kMaxUnits + 1;
  PC_REFUSES(ShapeError, (void)merge_many_launches(args));
}

PC_TEST(sizes_past_the_limits_are_refused) {
  BlockArray array;
  array.data = address(int64_t{1} << 40);
  array.itemsize = 1;
  array.dtype = 6;
  array.num_blocks = 4;
  array.block_stride = int64_t{1} << 40;
  array.ndim = 1;
  array.shape[0] = int64_t{1} << 36;
  array.strides[0] = 1;
  PC_REFUSES(ShapeError, (void)plan_blocks(array, array));
  array.shape[0] = int64_t{1} << 34;
  (void)plan_blocks(array, array);
  BlockArray odd = array, half = array;
  odd.data += 1;
  odd.dtype = 0;
  odd.itemsize = odd.strides[0] = 4;
  half.dtype = 1;
  half.itemsize = half.strides[0] = 2;
  PC_REFUSES(ShapeError, (void)plan_blocks(odd, half));
}

}  // namespace
