// AMX: the encodings of its instructions, and decode on emulated or real tiles.
#if defined(__x86_64__)

#define PC_ISA encoded
#include "pagecore/ops/cpu/kernels/simd/amx.hpp"
#include "tests/ops/native/tile_cases.hpp"

using namespace pagecore;
using namespace pagecore::test;
using namespace pagecore::cpu;

namespace {

// ---- encodings

using Amx = cpu::encoded::HardwareAmx;

[[gnu::noipa]] void configure(const cpu::encoded::AmxConfig& config) { Amx::configure(config); }
[[gnu::noipa]] void release() { Amx::release(); }
[[gnu::noipa]] void zero_5() { Amx::zero<5>(); }
[[gnu::noipa]] void load_3(const void* from, int64_t stride) { Amx::load<3>(from, stride); }
[[gnu::noipa]] void load_once_6(const void* from, int64_t stride) { Amx::load_once<6>(from, stride); }
[[gnu::noipa]] void store_2(void* to, int64_t stride) { Amx::store<2>(to, stride); }
[[gnu::noipa]] void multiply_1_4_7() { Amx::multiply<1, 4, 7>(); }
[[gnu::noipa]] void multiply_bytes_2_5_6() { Amx::multiply_bytes<2, 5, 6>(); }

// Checks that the function's code contains the instruction's bytes, without running it.
template <typename Function>
void is_encoded(Function* function, const char* name, std::initializer_list<uint8_t> bytes) {
  const auto* code = reinterpret_cast<const uint8_t*>(function);
  PC_CHECK(std::search(code, code + 48, bytes.begin(), bytes.end()) != code + 48, name);
}

// ---- decode

const Products* level_with_amx() {
  for (const Products* level : levels()) {
    if (level->score_amx != nullptr) return level;
  }
  return nullptr;
}

Numbers<uint16_t> random_bf16(Random& random, int64_t rows, int64_t stride, int64_t width) {
  Numbers<uint16_t> numbers(random, rows * stride);
  for (int64_t i = 0; i < rows * stride; ++i) {
    narrow(Float::BF16, i % stride < width ? random.normal() : 0.0, reinterpret_cast<char*>(&numbers[i]));
  }
  return numbers;
}

#if defined(__SANITIZE_ADDRESS__)
// Misuses that the emulation reports, if the machine supports the rest of the level.
struct Misuse {
  Misuse() {
    const Products* level = level_with_amx();
    if (level == nullptr) return;
    planted_.emplace_back("tiles_without_configuration", "tiles must be configured before", level->load_unconfigured);
    planted_.emplace_back("tiles_of_mismatched_shapes", "the rows of the left side", level->multiply_mismatched);
  }
  std::vector<Planted> planted_;
};

const Misuse misuse;
#endif

}  // namespace

// Intel 64 manual, volume 2. VEX.128, map 0F38, W0: C4 E2, then vvvv (inverted), L and the prefix in one byte; SIB 37
// is rdi + 1 * rsi, the first and the second argument.
PC_TEST(amx_instructions_are_encoded_as_in_the_manual) {
  rounds(1, [](Random&) {
    is_encoded(configure, "ldtilecfg (%rdi)", {0xc4, 0xe2, 0x78, 0x49, 0x07});
    is_encoded(release, "tilerelease", {0xc4, 0xe2, 0x78, 0x49, 0xc0});
    is_encoded(zero_5, "tilezero %tmm5", {0xc4, 0xe2, 0x7b, 0x49, 0xc0 | 5 << 3});
    is_encoded(load_3, "tileloadd (%rdi,%rsi), %tmm3", {0xc4, 0xe2, 0x7b, 0x4b, 0x04 | 3 << 3, 0x37});
    is_encoded(load_once_6, "tileloaddt1 (%rdi,%rsi), %tmm6", {0xc4, 0xe2, 0x79, 0x4b, 0x04 | 6 << 3, 0x37});
    is_encoded(store_2, "tilestored %tmm2, (%rdi,%rsi)", {0xc4, 0xe2, 0x7a, 0x4b, 0x04 | 2 << 3, 0x37});
    // The sum is ModRM.reg, the left side ModRM.rm, the right side vvvv.
    is_encoded(multiply_1_4_7, "tdpbf16ps %tmm7, %tmm4, %tmm1",
               {0xc4, 0xe2, 0x02 | (15 - 7) << 3, 0x5c, 0xc0 | 1 << 3 | 4});
    is_encoded(multiply_bytes_2_5_6, "tdpbssd %tmm6, %tmm5, %tmm2",
               {0xc4, 0xe2, 0x03 | (15 - 6) << 3, 0x5e, 0xc0 | 2 << 3 | 5});
  });
}

PC_TEST(products_of_bytes_by_amx_are_exact) {
  rounds(50, [](Random& random) {
    const Products* level = level_with_amx();
    if (level == nullptr) return;
    constexpr int64_t kRows = 16, kDepth = 64, kColumns = 16;
    const Numbers<int8_t> left(random, kRows * kDepth), right(random, kDepth * kColumns);
    const Numbers<int32_t> sums(random, kRows * kColumns), known(random, kRows * kColumns);
    const int64_t least = random.pick({-128, -3});
    for (int64_t i = 0; i < kRows * kDepth; ++i) left[i] = static_cast<int8_t>(random.between(least, 127));
    for (int64_t i = 0; i < kDepth * kColumns; ++i) right[i] = static_cast<int8_t>(random.between(least, 127));
    for (int64_t i = 0; i < kRows * kColumns; ++i) {
      sums[i] = known[i] = static_cast<int32_t>(random.between(-1000, 1000));
      for (int64_t k = 0; k < kDepth; ++k) {
        known[i] += left[i / kColumns * kDepth + k] * right[k / 4 * 4 * kColumns + i % kColumns * 4 + k % 4];
      }
    }
    level->multiply_bytes(left.data(), right.data(), sums.data());
    PC_CHECK(sums.bytes() == known.bytes(), "sums from ", least, " on");
  });
}

PC_TEST(decode_by_amx_has_the_scores_of_prefill_to_the_bit) {
  rounds(200, [](Random& random) {
    const Products* level = level_with_amx();
    if (level == nullptr) return;
    const int64_t dim = any_dim(random), depth = pair_padded(dim), stride = depth + 2 * random.below(3);
    const TileTokens tokens(random, Float::BF16, dim);
    const int64_t rows = random.between(1, 16);
    const Numbers<uint16_t> query = random_bf16(random, rows, stride, dim);
    const Numbers<uint32_t> keys(random, key_pairs_size(dim)), panel(random, depth / 2 * 16);
    const Numbers<uint16_t> copy(random, kTileTokens * depth);
    const Numbers<float> scores(random, rows * kTileTokens), known(random, rows * kTileTokens);
    level->pack_key_pairs(tokens.view(), dim, keys.data());
    level->multiply_pairs(0, query.data(), stride, keys.data(), kTileTokens, known.data(), kTileTokens, nullptr, rows,
                          depth, kTileTokens);
    level->score_amx(tokens.view(), dim, query.data(), stride, rows, panel.data(), copy.data(), scores.data());
    for (int64_t i = 0; i < rows * kTileTokens; ++i) {
      PC_CHECK(same_float(scores[i], known[i]), "row ", i / kTileTokens, " of ", rows, ", token ", i % kTileTokens,
               ", dim ", dim, ": ", scores[i], ", not ", known[i]);
    }
  });
}

// Prefill adds products to the old sums one by one, decode adds their sum.
PC_TEST(decode_by_amx_has_the_values_of_prefill) {
  rounds(200, [](Random& random) {
    const Products* level = level_with_amx();
    if (level == nullptr) return;
    const int64_t rows = random.between(1, 16), columns = kPadding * random.between(1, 12);
    const int64_t stride = columns + random.below(3), size = (rows - 1) * stride + columns;
    const Numbers<uint16_t> weights = random_bf16(random, 16, kTileTokens, kTileTokens);
    const Numbers<uint16_t> values = random_bf16(random, kTileTokens, columns, columns);
    const auto* pairs = reinterpret_cast<const uint32_t*>(values.data());
    const Numbers<float> acc(random, size), known(random, size);
    std::vector<float> factors(static_cast<size_t>(rows));
    for (float& each : factors) each = static_cast<float>(random.unit());
    for (int64_t i = 0; i < size; ++i) acc[i] = known[i] = static_cast<float>(random.normal());
    const float* factor = random.one_in(3) ? nullptr : factors.data();
    level->multiply_pairs(0, weights.data(), kTileTokens, pairs, columns, known.data(), stride, factor, rows,
                          kTileTokens, columns);
    level->accumulate_amx(weights.data(), pairs, columns, acc.data(), stride, factor, rows);
    for (int64_t i = 0; i < size; ++i) {
      if (i % stride >= columns) continue;
      PC_CHECK(std::fabs(acc[i] - known[i]) <= 1e-5F * (1 + std::fabs(known[i])), "row ", i / stride, " of ", rows,
               ", column ", i % stride, " of ", columns, ": ", acc[i], ", not ", known[i]);
    }
  });
}

#endif
