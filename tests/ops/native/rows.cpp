// write_kv and merges, bit for bit where promised; bytes between rows must not change.
#include <limits>

#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/ops.hpp"
#include "tests/ops/native/floats.hpp"
#include "tests/ops/native/hooks.hpp"

using namespace pagecore;
using namespace pagecore::test;
using namespace pagecore::cpu;

namespace {

// Numbers of every kind, including ties and overflows of the narrow types.
double any_number(Random& random) {
  const double number = random.normal();
  const double tie = (1.0 + static_cast<double>(random.below(4096)) / 4096) *
                     std::ldexp(1.0, static_cast<int>(random.between(-20, 16)));
  return random.pick({number, number, tie, -tie, 0.0, -0.0, 65504.0, 65519.0, 65520.0, 1e30, 3.39e38, 1e-30, 6e-8, 3e-8,
                      double{INFINITY}, -double{INFINITY}, std::nan("")});
}

void fill_numbers(Random& random, const Array& array, Float type) {
  for_each_index(array.shape(),
                 [&](const std::vector<int64_t>& at) { narrow(type, any_number(random), array.at(at)); });
}

// One plane of a write: new rows, a cache, and possibly a scale.
struct Plane {
  Plane(Random& random, int64_t tokens, int64_t blocks, int64_t block_size, int64_t heads)
      : from(random.pick(kFloats)),
        to(random.one_in(2) ? from : random.pick(kFloats)),
        dim(random.pick({random.between(1, 40), int64_t{64}, int64_t{128}, random.between(250, 270)})),
        rows(random, {tokens, heads, dim}, size_of(from), {true, random.one_in(2), true}),
        cache(random, {blocks, block_size, heads, dim}, size_of(to), {true, random.one_in(2), true}) {
    fill_numbers(random, rows, from);
    if (random.one_in(3)) scale.emplace(random, heads, 0.3, 3.0);
  }

  // Returns the expected memory of the cache after a write.
  [[nodiscard]] std::vector<char> written(const std::vector<int64_t>& slots) const {
    std::vector<char> bytes = cache.memory().copy();
    for (size_t token = 0; token < slots.size(); ++token) {
      if (slots[token] < 0) continue;
      const int64_t block = slots[token] / cache.shape(1), within = slots[token] % cache.shape(1);
      for (int64_t head = 0; head < cache.shape(2); ++head) {
        for (int64_t d = 0; d < dim; ++d) {
          const char* number = rows.at({static_cast<int64_t>(token), head, d});
          char* target = bytes.data() + cache.offset({block, within, head, d});
          if (from == to && !scale) {
            std::memcpy(target, number, static_cast<size_t>(size_of(to)));
          } else {
            const auto divisor = static_cast<float>(scale ? (*scale)[head] : 1.0);
            narrow(to, static_cast<float>(widen(from, number)) / divisor, target);
          }
        }
      }
    }
    return bytes;
  }

  void compare(const std::vector<char>& expected) const {
    std::vector<char> rest = cache.memory().copy(), wanted = expected;
    cache.memory().check();
    for_each_index(cache.shape(), [&](const std::vector<int64_t>& at) {
      const auto offset = static_cast<size_t>(cache.offset(at)), size = static_cast<size_t>(size_of(to));
      PC_CHECK(same_number(to, rest.data() + offset, wanted.data() + offset), isa(), ": ",
               widen(to, rest.data() + offset), " was written, expected ", widen(to, wanted.data() + offset));
      std::memset(rest.data() + offset, 0, size);
      std::memset(wanted.data() + offset, 0, size);
    });
    PC_CHECK(rest == wanted, "bytes between the rows were written");
  }

  Float from, to;
  int64_t dim;
  Array rows, cache;
  std::optional<HeadNumbers> scale;
};

// Random slots, some of them repeated or skipped, with runs of consecutive slots.
std::vector<int64_t> any_slots(Random& random, int64_t count, int64_t num_slots) {
  std::vector<int64_t> slots;
  while (std::ssize(slots) < count) {
    const bool goes_on = !slots.empty() && slots.back() >= 0 && slots.back() + 1 < num_slots && !random.one_in(6);
    slots.push_back(goes_on            ? slots.back() + 1
                    : random.one_in(5) ? random.pick({int64_t{-1}, int64_t{std::numeric_limits<int32_t>::min()}})
                                       : random.below(num_slots));
  }
  return slots;
}

void write_some_rows(Random& random) {
  hooks = {random.one_in(2), static_cast<int32_t>(random.pick({0, 0, 1, 3}))};
  const int64_t tokens = random.one_in(8) ? random.between(60, 140) : random.between(0, 20);
  const int64_t blocks = random.between(1, 5), block_size = random.pick({1, 3, 16, 24, 32}),
                heads = random.between(1, 4);
  Plane key(random, tokens, blocks, block_size, heads), value(random, tokens, blocks, block_size, heads);
  const std::vector<int64_t> slots = any_slots(random, random.between(0, tokens), blocks * block_size);
  const std::vector<char> key_bytes = key.written(slots), value_bytes = value.written(slots);
  const std::vector<char> key_before = key.cache.memory().copy(), value_before = value.cache.memory().copy();
  WriteArgs args;
  args.key = as_rows(key.rows, key.from);
  args.value = as_rows(value.rows, value.from);
  args.key_cache = as_cache(key.cache, key.to);
  args.value_cache = as_cache(value.cache, value.to);
  if (key.scale) args.key_scale = key.scale->per_head();
  if (value.scale) args.value_scale = value.scale->per_head();
  std::vector<int64_t> wrong = slots;
  if (!wrong.empty()) {
    wrong.back() = blocks * block_size;
    const Ids ids(random, wrong);
    args.slots = ids.indices();
    PC_REFUSES(InvalidBlock, write_kv(args));
  }
  wrong.assign(static_cast<size_t>(tokens) + 1, 0);
  const Ids longer(random, wrong);
  args.slots = longer.indices();
  PC_REFUSES(ShapeError, write_kv(args));
  same_bytes(key.cache, key_before, "key cache of a refused write");
  same_bytes(value.cache, value_before, "value cache of a refused write");
  const Ids ids(random, slots);
  args.slots = ids.indices();
  write_kv(args);
  key.compare(key_bytes);
  value.compare(value_bytes);
}

void merge_some(Random& random) {
  const int64_t tokens = random.between(0, 9), heads = random.between(1, 4);
  const int64_t dim = random.pick({random.between(1, 40), int64_t{64}});
  const bool has_mask = random.one_in(2);  // which needs out_a and out of one type
  const Float type_a = random.pick(kFloats), type_b = random.pick(kFloats);
  const Float type = has_mask ? type_a : random.pick(kFloats);
  const Array a(random, {tokens, heads, dim}, size_of(type_a)), b(random, {tokens, heads, dim}, size_of(type_b));
  const Array out(random, {tokens, heads, dim}, size_of(type));
  const Array lse_a(random, {tokens, heads}, 4), lse_b(random, {tokens, heads}, 4), lse(random, {tokens, heads}, 4);
  const auto numbers = [&](const Array& array, Float each) {
    for_each_index(array.shape(), [&](const auto& at) { narrow(each, random.normal(), array.at(at)); });
  };
  numbers(a, type_a);
  numbers(b, type_b);
  for_each_index(lse.shape(), [&](const auto& at) {
    const double x = random.one_in(4) ? -INFINITY : 20.0 * random.normal();
    const double y = random.one_in(4) ? -INFINITY : random.one_in(3) ? x : 20.0 * random.normal();
    narrow(Float::F32, x, lse_a.at(at));
    narrow(Float::F32, y, lse_b.at(at));
    // A part with weight 0 is not read.
    if (x == -INFINITY) std::memset(a.at({at[0], at[1], 0}), -1, static_cast<size_t>(dim * size_of(type_a)));
    if (y == -INFINITY) std::memset(b.at({at[0], at[1], 0}), -1, static_cast<size_t>(dim * size_of(type_b)));
  });
  MergeArgs args{as_rows(a, type_a), as_rows(b, type_b), as_rows(out, type), as_lse(lse_a), as_lse(lse_b), {}};
  if (random.one_in(2)) args.lse = as_lse(lse);
  std::vector<char> mask(static_cast<size_t>(tokens), 1);
  if (has_mask) {
    for (char& each : mask) each = random.one_in(3) ? 0 : 1;
    args.mask = mask.data();
    args.mask_stride = 1;
  }
  merge(args);
  for (const Array* array : {&a, &b, &out, &lse_a, &lse_b, &lse}) array->memory().check();
  for_each_index(lse.shape(), [&](const auto& at) {
    if (mask[static_cast<size_t>(at[0])] == 0) {
      const auto row = [&](const Array& array) { return array.at({at[0], at[1], 0}); };
      PC_CHECK(std::memcmp(row(out), row(a), static_cast<size_t>(dim * size_of(type))) == 0, isa(), ": output");
      PC_CHECK(args.lse.data == nullptr || std::memcmp(lse.at(at), lse_a.at(at), 4) == 0, isa(), ": lse");
      return;
    }
    const double x = widen(Float::F32, lse_a.at(at)), y = widen(Float::F32, lse_b.at(at));
    const double top = std::max(x, y);
    const double total = top == -INFINITY ? 0.0 : std::exp(x - top) + std::exp(y - top);
    const double part_a = total == 0.0 ? 0.0 : std::exp(x - top) / total;
    const double part_b = total == 0.0 ? 0.0 : std::exp(y - top) / total;
    const double bound = type == Float::F32 ? 1e-6 : type == Float::F16 ? 1e-3 : 5e-3;
    for (int64_t d = 0; d < dim; ++d) {
      const double in_a = part_a == 0.0 ? 0.0 : part_a * widen(type_a, a.at({at[0], at[1], d}));
      const double in_b = part_b == 0.0 ? 0.0 : part_b * widen(type_b, b.at({at[0], at[1], d}));
      const double found = widen(type, out.at({at[0], at[1], d}));
      PC_CHECK(std::fabs(found - in_a - in_b) <= bound * (std::fabs(in_a) + std::fabs(in_b)) + 1e-7, isa(), ": ", found,
               ", expected ", in_a + in_b);
    }
    if (args.lse.data == nullptr) return;
    const double expected = total == 0.0 ? -INFINITY : top + std::log(total), found = widen(Float::F32, lse.at(at));
    PC_CHECK(found == expected || std::fabs(found - expected) <= 1e-6 * std::max(1.0, std::fabs(expected)), found);
  });
}

// Rows of no parts, of a few, and of more than the kernel keeps weights for.
void merge_many_some(Random& random) {
  const int64_t tokens = random.between(0, 6), heads = random.between(1, 3);
  const int64_t dim = random.pick({random.between(1, 40), int64_t{64}, int64_t{136}});
  std::vector<int64_t> bounds(1, 0);
  for (int64_t token = 0; token < tokens; ++token) {
    bounds.push_back(bounds.back() + random.pick({random.between(0, 5), int64_t{0}, int64_t{300}}));
  }
  const int64_t parts = bounds.back() + random.between(0, 2);
  const Float type = random.pick(kFloats);
  const Array outs(random, {parts, heads, dim}, size_of(type)), lses(random, {parts, heads}, 4);
  const Array out(random, {tokens, heads, dim}, size_of(type)), lse(random, {tokens, heads}, 4);
  for_each_index(outs.shape(), [&](const auto& at) { narrow(type, random.normal(), outs.at(at)); });
  for_each_index(lses.shape(), [&](const auto& at) {
    const double weight = random.one_in(4) ? -INFINITY : random.one_in(9) ? INFINITY : 20.0 * random.normal();
    narrow(Float::F32, weight, lses.at(at));
    if (std::isinf(weight)) std::memset(outs.at({at[0], at[1], 0}), -1, static_cast<size_t>(dim * size_of(type)));
  });
  const Ids ids(random, bounds);
  MergeManyArgs args{as_rows(outs, type), as_lse(lses), 0, 0, ids.indices(), as_rows(out, type), as_lse(lse)};
  merge_many(args);
  for (const Array* array : {&outs, &lses, &out, &lse}) array->memory().check();
  for_each_index(lse.shape(), [&](const auto& at) {
    const int64_t begin = bounds[static_cast<size_t>(at[0])], end = bounds[static_cast<size_t>(at[0]) + 1];
    const auto weight = [&](int64_t part) {
      const double found = widen(Float::F32, lses.at({part, at[1]}));
      return std::isinf(found) ? -INFINITY : found;
    };
    double top = -INFINITY, total = 0.0;
    for (int64_t part = begin; part < end; ++part) top = std::max(top, weight(part));
    for (int64_t part = begin; part < end && top > -INFINITY; ++part) total += std::exp(weight(part) - top);
    const double bound = type == Float::F32 ? 2e-6 : type == Float::F16 ? 1e-3 : 5e-3;
    for (int64_t d = 0; d < dim; ++d) {
      double expected = 0.0, magnitude = 0.0;
      for (int64_t part = begin; part < end; ++part) {
        if (weight(part) == -INFINITY) continue;
        const double each = std::exp(weight(part) - top) / total * widen(type, outs.at({part, at[1], d}));
        expected += each;
        magnitude += std::fabs(each);
      }
      const double found = widen(type, out.at({at[0], at[1], d}));
      PC_CHECK(std::fabs(found - expected) <= bound * magnitude + 1e-7, isa(), ": ", found, ", expected ", expected);
    }
    const double expected = total == 0.0 ? -INFINITY : top + std::log(total), found = widen(Float::F32, lse.at(at));
    PC_CHECK(found == expected || std::fabs(found - expected) <= 1e-6 * std::max(1.0, std::fabs(expected)), found);
  });
}

}  // namespace

PC_TEST(write_puts_every_row_in_its_slot_and_nothing_else) {
  for (const std::string& name : available_isas()) {
    set_isa(name);
    rounds(150, write_some_rows);
  }
  hooks = {};
  set_isa("");
}

PC_TEST(merge_many_joins_all_parts_of_a_token_and_refuses_wrong_bounds) {
  for (const std::string& name : available_isas()) {
    set_isa(name);
    rounds(60, merge_many_some);
  }
  set_isa("");
  Random random(1);
  for (const std::vector<int64_t>& wrong : {std::vector<int64_t>{1, 2}, {0, 2, 1}, {0, 4}, {0, -1}}) {
    const Ids ids(random, wrong);
    PC_REFUSES(ShapeError, check_parts(ids.indices(), 3));
  }
}

PC_TEST(merge_joins_two_parts_by_their_weights) {
  for (const std::string& name : available_isas()) {
    set_isa(name);
    rounds(150, merge_some);
  }
  set_isa("");
}

PC_TEST(an_unavailable_instruction_set_is_refused) {
  const std::string before = isa();
  for (const char* name : {"x86-64-v9", "v3", "avx2", " "}) PC_REFUSES(UnsupportedOption, set_isa(name));
  PC_CHECK(isa() == before, isa());
}
