// The host kernels without Python: random batches of every dtype against float64. Built and run for instruction sets
// that no test machine has (aarch64 under qemu-user); prints the worst relative error and exits 1 when it is out of
// bounds.
//
//   aarch64-linux-gnu-g++ -O2 -std=c++20 -ffp-contract=fast -static -I. -o smoke
//       tests/ops/native/smoke.cpp pagecore/ops/cpu/*.cpp pagecore/ops/cpu/isa/neon.cpp
//   qemu-aarch64 ./smoke
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/ops.hpp"

using namespace pagecore::cpu;

namespace {

constexpr int64_t kBlock = 5, kLength = 150, kQueries = 7, kKvHeads = 2, kGroup = 3, kHeads = kKvHeads * kGroup;

// float32 to a narrow float by truncation, which float16 and bfloat16 numbers made this way survive unchanged.
uint16_t narrow(Float type, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (type == Float::BF16) return static_cast<uint16_t>(bits >> 16);
  const uint32_t exponent = (bits >> 23) & 0xff;
  if (exponent < 113) return 0;
  return static_cast<uint16_t>(((bits >> 16) & 0x8000) | ((exponent - 112) << 10) | ((bits >> 13) & 0x3ff));
}

double widen(Float type, const char* p) {
  if (type == Float::F32) {
    float x;
    std::memcpy(&x, p, 4);
    return x;
  }
  uint16_t half;
  std::memcpy(&half, p, 2);
  if (type == Float::BF16) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  }
  const int exponent = (half >> 10) & 31;
  if (exponent == 0) return 0.0;
  return std::ldexp(1024 + (half & 1023), exponent - 25) * ((half & 0x8000) != 0 ? -1 : 1);
}

struct Array {
  Float type;
  int64_t dim;
  std::vector<char> bytes;

  Array(Float type, int64_t rows, int64_t dim, std::mt19937& random)
      : type(type), dim(dim), bytes(static_cast<size_t>(rows * dim * size_of(type))) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < rows * dim; ++i) {
      const float x = normal(random);
      const uint16_t half = narrow(type, x);
      if (type == Float::F32) std::memcpy(bytes.data() + 4 * i, &x, 4);
      if (type != Float::F32) std::memcpy(bytes.data() + 2 * i, &half, 2);
    }
  }
  double at(int64_t row, int64_t d) const { return widen(type, bytes.data() + (row * dim + d) * size_of(type)); }
  Cache cache(int64_t blocks) {
    const int64_t head = dim * size_of(type);
    return {bytes.data(), type, blocks, kBlock, kKvHeads, dim, kBlock * kKvHeads * head, kKvHeads * head, head};
  }
  Rows rows(int64_t tokens, int64_t heads) {
    const int64_t head = dim * size_of(type);
    return {bytes.data(), type, tokens, heads, dim, heads * head, head};
  }
};

double worst_error(Float cache_type, int64_t dim, double softcap, std::mt19937& random) {
  const int64_t blocks = kLength / kBlock;
  Array key(cache_type, blocks * kBlock * kKvHeads, dim, random),
      value(cache_type, blocks * kBlock * kKvHeads, dim, random);
  Array query(Float::F32, kQueries * kHeads, dim, random), out(Float::F32, kQueries * kHeads, dim, random);
  std::vector<int32_t> table(static_cast<size_t>(blocks)), cu{0, kQueries}, lens{kLength};
  for (int64_t i = 0; i < blocks; ++i) table[static_cast<size_t>(i)] = static_cast<int32_t>(blocks - 1 - i);
  AttentionArgs args;
  args.query = query.rows(kQueries, kHeads);
  args.out = out.rows(kQueries, kHeads);
  args.key = key.cache(blocks);
  args.value = value.cache(blocks);
  args.table = {reinterpret_cast<char*>(table.data()), 1, blocks, 0, false};
  args.seq_lens = {reinterpret_cast<char*>(lens.data()), 1, 4, false};
  args.cu_query_lens = {reinterpret_cast<char*>(cu.data()), 2, 4, false};
  args.scale = 1.0 / std::sqrt(static_cast<double>(dim));
  args.softcap = softcap;
  attention(args, nullptr);

  double error = 0.0, norm = 0.0;
  for (int64_t row = 0; row < kQueries * kHeads; ++row) {
    const int64_t position = kLength - kQueries + row / kHeads, head = row % kHeads / kGroup;
    std::vector<double> expected(static_cast<size_t>(dim), 0.0);
    double total = 0.0;
    for (int64_t j = 0; j <= position; ++j) {
      const int64_t at = (table[static_cast<size_t>(j / kBlock)] * kBlock + j % kBlock) * kKvHeads + head;
      double score = 0.0;
      for (int64_t d = 0; d < dim; ++d) score += query.at(row, d) * key.at(at, d);
      score *= args.scale;
      if (softcap != 0.0) score = softcap * std::tanh(score / softcap);
      total += std::exp(score);
      for (int64_t d = 0; d < dim; ++d) expected[static_cast<size_t>(d)] += std::exp(score) * value.at(at, d);
    }
    for (int64_t d = 0; d < dim; ++d) {
      const double right = expected[static_cast<size_t>(d)] / total, wrong = out.at(row, d) - right;
      error += wrong * wrong;
      norm += right * right;
    }
  }
  return std::sqrt(error / norm);
}

}  // namespace

int main() {
  std::mt19937 random(1);
  double worst = 0.0;
  for (const std::string& name : available_isas()) {
    set_isa(name);
    for (const Float type : {Float::F32, Float::F16, Float::BF16}) {
      for (const int64_t dim : {1, 7, 64, 80, 128}) {
        for (const double softcap : {0.0, 5.0}) worst = std::max(worst, worst_error(type, dim, softcap, random));
      }
    }
    std::printf("%s: worst relative error %.2e\n", name.c_str(), worst);
  }
  return worst <= 2e-6 ? 0 : 1;
}
