// Random tiles of a cache, random numbers, and the instruction sets under test, for the drivers of packed products.
#pragma once

#include <algorithm>
#include <limits>

#include "pagecore/ops/cpu/dispatch.hpp"
#include "tests/ops/native/floats.hpp"
#include "tests/ops/native/levels/products.hpp"

namespace pagecore::test {

using cpu::kTileTokens;

inline const Products* level_of(const std::string& isa) {
#if defined(__x86_64__)
  for (const Products* each :
       {&v2::kProducts, &v3::kProducts, &v4::kProducts, &v4_bf16::kProducts, &v4_amx::kProducts}) {
    std::string name = "x86-64-" + std::string(each->name);
    std::replace(name.begin(), name.end(), '_', '-');
    if (name == isa) return each;
  }
#else
  if (isa == neon::kProducts.name) return &neon::kProducts;
#endif
  fail_check(__FILE__, __LINE__, "every instruction set must have its products", isa);
}

inline std::vector<const Products*> levels() {
  std::vector<const Products*> all;
  for (const std::string& isa : cpu::available_isas()) {
    if (isa != "x86-64-v4-vnni") all.push_back(level_of(isa));  // it has the products of v4_bf16 but for pairs
  }
  return all;
}

// `size` guarded numbers, NaN until written.
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

// A row of the cache for each token. Unused rows hold NaN, and their offsets are invalid.
class TileTokens {
 public:
  TileTokens(Random& random, Float type, int64_t dim) : type_(type), dim_(dim), used_(kTileTokens, 1) {
    choose_used(random);
    place_rows(random);
    view_ = {memory_.front().data(), offsets_, first_, last_, masked_ ? used_.data() : nullptr};
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
  // The expected number d of token t.
  [[nodiscard]] float number(int64_t t, int64_t d) const {
    return is_used(t) && d < dim_ ? static_cast<float>(widen(type_, place(t, d))) : 0.0f;
  }
  [[nodiscard]] uint16_t bits(int64_t t, int64_t d) const {
    uint16_t bits = 0;
    if (is_used(t) && d < dim_) std::memcpy(&bits, place(t, d), 2);
    return bits;
  }

 private:
  void choose_used(Random& random) {
    first_ = static_cast<int>(random.one_in(2) ? 0 : random.below(kTileTokens));
    last_ = static_cast<int>(random.one_in(2) ? kTileTokens : random.between(first_, kTileTokens));
    masked_ = random.one_in(3);
    const int64_t rarity = random.pick({2, 20});
    for (uint8_t& each : used_) each = masked_ && random.one_in(rarity) ? 0 : 1;
  }
  // Places rows in runs with a constant stride.
  void place_rows(Random& random) {
    const int64_t run = random.pick({1, 5, 16, 64}), size = size_of(type_), stride = size * (dim_ + random.below(3));
    for (int64_t t = 0; t < kTileTokens; ++t) {
      if (t % run == 0) {
        memory_.emplace_back((run - 1) * stride + dim_ * size, size * random.below(32));
        std::memset(memory_.back().data(), 0xff, static_cast<size_t>(memory_.back().size()));
      }
      places_[t] = memory_.back().data() + t % run * stride;
      const int64_t nowhere = std::numeric_limits<int32_t>::max() * int64_t{4096};
      offsets_[t] = is_used(t) ? places_[t] - memory_.front().data() : nowhere;
    }
  }
  [[nodiscard]] bool is_used(int64_t t) const { return t >= first_ && t < last_ && used_[static_cast<size_t>(t)] != 0; }
  [[nodiscard]] char* place(int64_t t, int64_t d) const { return places_[t] + d * size_of(type_); }

  Float type_;
  int64_t dim_;
  int first_ = 0, last_ = 0;
  bool masked_ = false;
  std::vector<uint8_t> used_;
  std::vector<Guarded> memory_;
  char* places_[kTileTokens];
  int64_t offsets_[kTileTokens];
  TileView view_{};
  bool is_finite_ = true;
};

inline int64_t any_dim(Random& random) {
  return random.pick({random.between(1, 150), int64_t{64}, int64_t{80}, int64_t{128}});
}

inline bool same_float(float a, float b) { return std::isnan(a) ? std::isnan(b) : a == b; }

}  // namespace pagecore::test
