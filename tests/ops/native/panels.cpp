// Packed tiles and matrix products on every instruction set of this machine, against float64.
#include "tests/ops/native/tile_cases.hpp"

using namespace pagecore;
using namespace pagecore::test;
using namespace pagecore::cpu;

namespace {

// ---- packing

void check_floats(Random& random, const Products& level) {
  const Float type = random.pick(kFloats);
  const int64_t dim = any_dim(random), width = padded(dim);
  const TileTokens tokens(random, type, dim);
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
  const TileTokens tokens(random, Float::BF16, dim);
  const Numbers<uint32_t> keys(random, key_pairs_size(dim)), values(random, kTileTokens / 2 * width);
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

// A product and its expected result; gaps between rows hold NaN.
struct ProductCase {
  int64_t rows, depth, columns, lda, ldb, ldc;
  bool in_pairs;
  std::vector<double> a, b;  // [rows, depth], [depth, columns]
  std::vector<float> factor;
  Numbers<char> left, right;
  Numbers<float> before;

  ProductCase(Random& random, bool pairs)
      : rows(random.pick({random.between(1, 20), random.between(1, 200), int64_t{64}})),
        depth(pairs ? kPairDepth * random.between(1, 6)
                    : random.pick({random.between(0, 200), int64_t{64}, random.between(257, 400)})),
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

  // Computes rows row .. row + count and columns column .. column + width, in a copy of the old output.
  [[nodiscard]] std::vector<float> run(Random& random, const Products& level, int64_t row, int64_t count,
                                       int64_t column, int64_t width, int64_t first_rows = 0) const {
    const std::vector<char> was = before.bytes();
    const Numbers<float> out(random, std::ssize(was) / 4);
    std::memcpy(out.data(), was.data(), was.size());
    float* c = out.data() + row * ldc + column;
    const float* factors = factor.empty() ? nullptr : factor.data() + row;
    const auto* b_begin = reinterpret_cast<const float*>(right.data()) + column;
    if (in_pairs) {
      level.multiply_pairs(first_rows, reinterpret_cast<const uint16_t*>(left.data()) + row * lda, lda,
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
        PC_CHECK(std::isnan(found[i]), level.name, ": a gap between rows was written");
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
  const ProductCase product(random, pairs);
  const std::vector<float> all = product.run(random, level, 0, product.rows, 0, product.columns);
  product.compare(level, all);
  // A row has the same bits regardless of other rows.
  const int64_t row = random.below(product.rows), count = random.between(1, product.rows - row);
  const int64_t column = kPadding * random.below(product.columns / kPadding);
  const int64_t width = kPadding * random.between(1, (product.columns - column) / kPadding);
  const std::vector<float> part = product.run(random, level, row, count, column, width, random.below(count + 1));
  for (int64_t m = row; m < row + count; ++m) {
    for (int64_t n = column; n < column + width; ++n) {
      PC_CHECK(same_bits(part[m * product.ldc + n], all[m * product.ldc + n]), level.name, ": bits of [", m, ", ", n,
               "] of ", product.rows, " x ", product.columns, " depend on other rows or columns");
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

PC_TEST(products_of_floats_match_float64_and_rows_are_independent) {
  rounds(60, [](Random& random) {
    for (const Products* level : levels()) check_product(random, *level, false);
  });
}

PC_TEST(products_of_pairs_match_float64_and_rows_are_independent) {
  rounds(60, [](Random& random) {
    for (const Products* level : levels()) {
      if (level->has_pairs) check_product(random, *level, true);
    }
  });
}
