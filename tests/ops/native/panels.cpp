// Packed tiles and products with them, on every level that this machine has, against float64.
#include <algorithm>
#include <limits>

#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/panel_sizes.hpp"
#include "tests/ops/native/floats.hpp"
#include "tests/ops/native/levels/products.hpp"

using namespace pagecore;
using namespace pagecore::test;
using namespace pagecore::cpu;

namespace {

const Products* level_of(const std::string& isa) {
#if defined(__x86_64__)
  for (const Products* each : {&test::v2::kProducts, &test::v3::kProducts, &test::v4::kProducts,
                               &test::v4_bf16::kProducts, &test::v4_amx::kProducts}) {
    std::string name = "x86-64-" + std::string(each->name);
    std::replace(name.begin(), name.end(), '_', '-');
    if (name == isa) return each;
  }
#else
  if (isa == test::neon::kProducts.name) return &test::neon::kProducts;
#endif
  fail_check(__FILE__, __LINE__, "every level has its products", isa);
}

std::vector<const Products*> levels() {
  std::vector<const Products*> all;
  for (const std::string& isa : available_isas()) all.push_back(level_of(isa));
  return all;
}

// `size` numbers with a guard around them, which hold NaN until they are written.
template <typename T>
class Numbers {
 public:
  Numbers(Random& random, int64_t size) : memory_(size * int64_t{sizeof(T)}, 4 * random.below(16)) {
    std::memset(memory_.data(), 0xff, static_cast<size_t>(memory_.size()));
  }
  [[nodiscard]] T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  [[nodiscard]] T& operator[](int64_t i) const { return data()[i]; }
  [[nodiscard]] std::vector<char> bytes() const {
    memory_.check();
    return memory_.copy();
  }

 private:
  Guarded memory_;
};

// ---- packing

// A row of the cache for each token that may be read; the others lie where nothing may be read.
class Tokens {
 public:
  Tokens(Random& random, Float type, int64_t dim) : type_(type), dim_(dim), used_(kTileTokens, 1) {
    view_.first = static_cast<int>(random.one_in(2) ? 0 : random.below(kTileTokens));
    view_.last = static_cast<int>(random.one_in(2) ? kTileTokens : random.between(view_.first, kTileTokens));
    const bool is_masked = random.one_in(3);
    const int64_t rarity = random.pick({2, 20});
    for (int64_t t = 0; t < kTileTokens; ++t) {
      if (is_masked && random.one_in(rarity)) used_[t] = 0;
      rows_.emplace_back(is_used(t) ? dim * size_of(type) : 0, size_of(type) * random.below(32));
      offsets_[t] = is_used(t) ? rows_.back().data() - base() : std::numeric_limits<int32_t>::max() * int64_t{4096};
    }
    view_.base = base();
    view_.offsets = offsets_;
    view_.used = is_masked ? used_.data() : nullptr;
    const int64_t oddity = random.pick({0, 100, 10000});
    for (int64_t t = 0; t < kTileTokens; ++t) {
      for (int64_t d = 0; d < dim && is_used(t); ++d) {
        const bool is_odd = oddity > 0 && random.one_in(oddity);
        const double number =
            is_odd ? random.pick({double{INFINITY}, -double{INFINITY}, std::nan("")}) : random.normal();
        narrow(type, number * random.pick({1.0, 1e-4, 6e4}), place(t, d));
        is_finite_ = is_finite_ && std::isfinite(widen(type, place(t, d)));
      }
    }
  }

  [[nodiscard]] const TileView& view() const { return view_; }
  [[nodiscard]] bool is_finite() const { return is_finite_; }
  // What must stand for number d of token t.
  [[nodiscard]] float number(int64_t t, int64_t d) const {
    return is_used(t) && d < dim_ ? static_cast<float>(widen(type_, place(t, d))) : 0.0f;
  }
  [[nodiscard]] uint16_t bits(int64_t t, int64_t d) const {
    uint16_t bits = 0;
    if (is_used(t) && d < dim_) std::memcpy(&bits, place(t, d), 2);
    return bits;
  }

 private:
  [[nodiscard]] bool is_used(int64_t t) const { return t >= view_.first && t < view_.last && used_[t] != 0; }
  [[nodiscard]] const char* base() const { return rows_.front().data(); }
  [[nodiscard]] char* place(int64_t t, int64_t d) const { return rows_[t].data() + d * size_of(type_); }

  Float type_;
  int64_t dim_;
  std::vector<uint8_t> used_;
  std::vector<Guarded> rows_;
  int64_t offsets_[kTileTokens];
  TileView view_{};
  bool is_finite_ = true;
};

int64_t any_dim(Random& random) {
  return random.pick({random.between(1, 150), int64_t{64}, int64_t{80}, int64_t{128}});
}

bool same_float(float a, float b) { return std::isnan(a) ? std::isnan(b) : a == b; }

void check_floats(Random& random, const Products& level) {
  const Float type = random.pick(kFloats);
  const int64_t dim = any_dim(random), width = padded(dim);
  const Tokens tokens(random, type, dim);
  const Numbers<float> keys(random, key_panel_size(dim)), values(random, value_panel_size(dim));
  level.pack_keys(type, tokens.view(), dim, keys.data());
  PC_CHECK(level.pack_values(type, tokens.view(), dim, values.data()) == tokens.is_finite(), level.name);
  for (int64_t t = 0; t < kTileTokens; ++t) {
    for (int64_t d = 0; d < width; ++d) {
      const float number = tokens.number(t, d), key = keys[d * kTileTokens + t], value = values[t * width + d];
      PC_CHECK(same_float(key, number), level.name, " key ", t, ", ", d, " of ", dim, ": ", key, ", not ", number);
      PC_CHECK(same_float(value, number), level.name, " value ", t, ", ", d, " of ", dim, ": ", value, ", not ",
               number);
    }
  }
}

void check_pairs(Random& random, const Products& level) {
  const int64_t dim = any_dim(random), width = padded(dim);
  const Tokens tokens(random, Float::BF16, dim);
  const Numbers<uint32_t> keys(random, key_pairs_size(dim)), values(random, value_pairs_size(dim));
  level.pack_key_pairs(tokens.view(), dim, keys.data());
  PC_CHECK(level.pack_value_pairs(tokens.view(), dim, values.data()) == tokens.is_finite(), level.name);
  const auto pair = [](uint32_t low, uint32_t high) { return low | high << 16; };
  for (int64_t t = 0; t < kTileTokens; ++t) {
    for (int64_t d = 0; d < pair_padded(dim); d += 2) {
      PC_CHECK(keys[d / 2 * kTileTokens + t] == pair(tokens.bits(t, d), tokens.bits(t, d + 1)), level.name, " key ", t,
               ", ", d, " of ", dim);
    }
    for (int64_t d = 0; d < width && t % 2 == 0; ++d) {
      PC_CHECK(values[t / 2 * width + d] == pair(tokens.bits(t, d), tokens.bits(t + 1, d)), level.name, " value ", t,
               ", ", d, " of ", dim);
    }
  }
}

// ---- products

// A product and what it must give; what lies between the rows is NaN.
struct Case {
  int64_t rows, depth, columns, lda, ldb, ldc;
  bool in_pairs;
  std::vector<double> a, b;  // [rows, depth], [depth, columns]
  std::vector<float> factor;
  Numbers<char> left, right;
  Numbers<float> before;

  Case(Random& random, bool pairs)
      : rows(random.pick({random.between(1, 20), random.between(1, 200), int64_t{64}})),
        depth(pairs ? kPairDepth * random.between(1, 6) : random.pick({random.between(0, 200), int64_t{64}})),
        columns(kPadding * random.between(1, 12)),
        lda(depth + random.below(5)),
        ldb(columns + random.below(5)),
        ldc(columns + random.below(5)),
        in_pairs(pairs),
        a(rows * depth),
        b(depth * columns),
        factor(random.one_in(2) ? rows : 0),
        left(random, bytes_of(rows, lda, depth) / (pairs ? 2 : 1)),
        right(random, bytes_of(pairs ? depth / 2 : depth, ldb, columns)),
        before(random, bytes_of(rows, ldc, columns) / 4) {
    const Float type = pairs ? Float::BF16 : Float::F32;
    for (int64_t i = 0; i < rows * depth; ++i) {
      char* place = left.data() + (i / depth * lda + i % depth) * size_of(type);
      narrow(type, random.normal(), place);
      a[i] = widen(type, place);
    }
    for (int64_t i = 0; i < depth * columns; ++i) {
      const int64_t k = i / columns, n = i % columns;
      char* place = right.data() + (pairs ? (k / 2 * ldb + n) * 4 + k % 2 * 2 : (k * ldb + n) * 4);
      narrow(type, random.normal(), place);
      b[i] = widen(type, place);
    }
    for (float& each : factor) each = static_cast<float>(random.pick({0.0, 1.0, random.unit()}));
    for (int64_t i = 0; i < rows * columns && !factor.empty(); ++i) {
      before[i / columns * ldc + i % columns] = static_cast<float>(random.normal());
    }
  }

  static int64_t bytes_of(int64_t rows, int64_t stride, int64_t width) {
    return rows == 0 ? 0 : 4 * ((rows - 1) * stride + width);
  }

  // Rows row .. row + count and columns column .. column + width, into a copy of what was there.
  [[nodiscard]] std::vector<float> run(Random& random, const Products& level, int64_t row, int64_t count,
                                       int64_t column, int64_t width) const {
    const std::vector<char> was = before.bytes();
    const Numbers<float> out(random, std::ssize(was) / 4);
    std::memcpy(out.data(), was.data(), was.size());
    float* c = out.data() + row * ldc + column;
    const float* factors = factor.empty() ? nullptr : factor.data() + row;
    const auto* b_begin = reinterpret_cast<const float*>(right.data()) + column;
    if (in_pairs) {
      level.multiply_pairs(reinterpret_cast<const uint16_t*>(left.data()) + row * lda, lda,
                           reinterpret_cast<const uint32_t*>(b_begin), ldb, c, ldc, factors, count, depth, width);
    } else {
      level.multiply_floats(reinterpret_cast<const float*>(left.data()) + row * lda, lda, b_begin, ldb, c, ldc, factors,
                            count, depth, width);
    }
    const std::vector<char> is = out.bytes();
    std::vector<float> numbers(is.size() / 4);
    std::memcpy(numbers.data(), is.data(), is.size());
    return numbers;
  }

  void compare(const Products& level, const std::vector<float>& found) const {
    const double epsilon = 0x1p-23 * (static_cast<double>(depth) + 2);
    for (int64_t i = 0; i < std::ssize(found); ++i) {
      const int64_t m = i / ldc, n = i % ldc;
      if (n >= columns) {
        PC_CHECK(std::isnan(found[i]), level.name, ": what lies between the rows was written");
        continue;
      }
      double sum = factor.empty() ? 0.0 : static_cast<double>(factor[m]) * before[i], magnitude = std::fabs(sum);
      for (int64_t k = 0; k < depth; ++k) {
        sum += a[m * depth + k] * b[k * columns + n];
        magnitude += std::fabs(a[m * depth + k] * b[k * columns + n]);
      }
      PC_CHECK(std::fabs(found[i] - sum) <= epsilon * magnitude, level.name, " [", m, ", ", n, "] of ", rows, " x ",
               depth, " x ", columns, ": ", found[i], ", not ", sum);
    }
  }
};

bool same_bits(float a, float b) { return std::memcmp(&a, &b, sizeof(a)) == 0; }

void check_product(Random& random, const Products& level, bool pairs) {
  const Case product(random, pairs);
  const std::vector<float> all = product.run(random, level, 0, product.rows, 0, product.columns);
  product.compare(level, all);
  // Alone, or beside others, a row has the same bits.
  const int64_t row = random.below(product.rows), count = random.between(1, product.rows - row);
  const int64_t column = kPadding * random.below(product.columns / kPadding);
  const int64_t width = kPadding * random.between(1, (product.columns - column) / kPadding);
  const std::vector<float> part = product.run(random, level, row, count, column, width);
  for (int64_t m = row; m < row + count; ++m) {
    for (int64_t n = column; n < column + width; ++n) {
      PC_CHECK(same_bits(part[m * product.ldc + n], all[m * product.ldc + n]), level.name, ": bits of [", m, ", ", n,
               "] of ", product.rows, " x ", product.columns, " depend on what is beside it");
    }
  }
}

}  // namespace

PC_TEST(packed_tiles_hold_every_number_that_is_used_and_zeros) {
  rounds(60, [](Random& random) {
    for (const Products* level : levels()) check_floats(random, *level);
  });
}

PC_TEST(packed_pairs_hold_every_number_that_is_used_and_zeros) {
  rounds(60, [](Random& random) {
    for (const Products* level : levels()) check_pairs(random, *level);
  });
}

PC_TEST(products_of_floats_are_those_of_float64_and_rows_do_not_meet) {
  rounds(60, [](Random& random) {
    for (const Products* level : levels()) check_product(random, *level, false);
  });
}

PC_TEST(products_of_pairs_are_those_of_float64_and_rows_do_not_meet) {
  rounds(60, [](Random& random) {
    for (const Products* level : levels()) {
      if (level->has_pairs) check_product(random, *level, true);
    }
  });
}
