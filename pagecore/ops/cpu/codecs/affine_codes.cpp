#include "pagecore/ops/cpu/codecs/affine_codes.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>

#include "pagecore/ops/cpu/codecs/bfloat16.hpp"
#include "pagecore/ops/cpu/codecs/float16.hpp"
#include "pagecore/ops/cpu/threads/cost.hpp"
#include "pagecore/ops/cpu/threads/threads.hpp"

namespace pagecore::cpu {
namespace {

// Lanes that are converted together: their numbers stay in registers and the L1 cache.
constexpr int64_t kLanesTogether = 64;
// Numbers that one core converts in a microsecond.
constexpr double kAffinePerUs = 400.0;
constexpr float kLargestFloat = 0x1.fffffep127f;
constexpr float kNanFloat = std::bit_cast<float>(0x7fc00000);

// Numbers of `count` lanes, converted to and from float32.
struct LaneNumbers {
  char* data;
  int64_t stride;
  Float type;
  int64_t count;

  template <typename Number, typename Convert>
  void read_as(float* out, Convert convert) const {
    const auto copy = [&](int64_t step) {
      for (int64_t lane = 0; lane < count; ++lane) {
        out[lane] = convert(*reinterpret_cast<const Number*>(data + lane * step));
      }
    };
    // A stride that the compiler knows makes vectors.
    if (stride == static_cast<int64_t>(sizeof(Number))) return copy(static_cast<int64_t>(sizeof(Number)));
    copy(stride);
  }
  void read(float* out) const {
    switch (type) {
      case Float::F32: return read_as<float>(out, [](float x) { return x; });
      case Float::F16: return read_as<uint16_t>(out, from_f16);
      default: return read_as<uint16_t>(out, from_bf16);
    }
  }
  void write(const float* numbers) const {
    for (int64_t lane = 0; lane < count; ++lane) {
      char* const at = data + lane * stride;
      switch (type) {
        case Float::F32: *reinterpret_cast<float*>(at) = numbers[lane]; break;
        case Float::F16: *reinterpret_cast<uint16_t*>(at) = to_f16(numbers[lane]); break;
        default: *reinterpret_cast<uint16_t*>(at) = to_bf16(numbers[lane]);
      }
    }
  }
};

// Some lanes of one matrix.
class LaneCodec {
 public:
  LaneCodec(const AffineCodes& codes, int64_t matrix, int64_t first)
      : codes_(codes),
        numbers_(codes.numbers + matrix * codes.numbers_matrix_stride + first * codes.lane_stride),
        words_(codes.words + matrix * codes.words_matrix_stride + first * codes.word_lane_stride),
        scales_(codes.scales + matrix * codes.scales_matrix_stride + first * codes.scale_lane_stride),
        count_(std::min(kLanesTogether, codes.num_lanes - first)) {}

  void quantize() {
    for (int64_t begin = 0; begin < codes_.num_entries; begin += codes_.group) {
      make_scales(begin);
      for (int64_t entry = begin; entry < begin + codes_.group; ++entry) add_codes(entry);
    }
  }

  void dequantize() {
    float numbers[kLanesTogether];
    for (int64_t entry = 0; entry < codes_.num_entries; ++entry) {
      if (entry % codes_.group == 0) read_scales(entry);
      const int64_t shift = entry % codes_in_word() * codes_.bits;
      for (int64_t lane = 0; lane < count_; ++lane) {
        const uint32_t code = word(entry, lane) >> shift & static_cast<uint32_t>(largest_code());
        // The product is exact in double, so that a fused sum has the same bits.
        numbers[lane] = static_cast<float>(double{least_[lane]} + static_cast<double>(code) * double{scale_[lane]});
      }
      lanes_of(entry).write(numbers);
    }
  }

 private:
  [[nodiscard]] int64_t codes_in_word() const { return 32 / codes_.bits; }
  [[nodiscard]] float largest_code() const { return codes_.bits == 2 ? 3.0f : 15.0f; }
  [[nodiscard]] float largest_number() const {
    return codes_.scale_type == Float::F32 ? kLargestFloat : codes_.scale_type == Float::F16 ? 65504.0f : 0x1.fep127f;
  }
  [[nodiscard]] uint32_t& word(int64_t entry, int64_t lane) const {
    char* const at = words_ + entry / codes_in_word() * codes_.word_stride + lane * codes_.word_lane_stride;
    return *reinterpret_cast<uint32_t*>(at);
  }
  [[nodiscard]] LaneNumbers lanes_of(int64_t entry) const {
    return {numbers_ + entry * codes_.entry_stride, codes_.lane_stride, codes_.type, count_};
  }
  [[nodiscard]] LaneNumbers scales_at(int64_t entry, int64_t offset) const {
    char* const at = scales_ + entry / codes_.group * codes_.group_stride + offset;
    return {at, codes_.scale_lane_stride, codes_.scale_type, count_};
  }

  // Reads the numbers of an entry; infinities become the largest number.
  void read_finite(int64_t entry, float* numbers) const {
    const float most = largest_number();
    lanes_of(entry).read(numbers);
    for (int64_t lane = 0; lane < count_; ++lane) {
      const float x = numbers[lane] > most ? most : numbers[lane];
      numbers[lane] = x < -most ? -most : x;
    }
  }

  // Computes and stores the scales of the group that begins at an entry.
  void make_scales(int64_t begin) {
    float numbers[kLanesTogether], low[kLanesTogether], high[kLanesTogether];
    uint32_t nan[kLanesTogether] = {};
    std::fill_n(low, kLanesTogether, kLargestFloat);
    std::fill_n(high, kLanesTogether, -kLargestFloat);
    for (int64_t entry = begin; entry < begin + codes_.group; ++entry) {
      read_finite(entry, numbers);
      for (int64_t lane = 0; lane < count_; ++lane) {
        const float x = numbers[lane];
        low[lane] = x < low[lane] ? x : low[lane];
        high[lane] = x > high[lane] ? x : high[lane];
        nan[lane] |= x != x ? 1u : 0u;
      }
    }
    for (int64_t lane = 0; lane < count_; ++lane) {
      const float range = std::min(high[lane] - low[lane], kLargestFloat);
      scale_[lane] = nan[lane] != 0 ? kNanFloat : range / largest_code();
      least_[lane] = nan[lane] != 0 ? 0.0f : low[lane] + 0.0f;  // 0 for -0
    }
    scales_at(begin, 0).write(scale_);
    scales_at(begin, codes_.least_offset).write(least_);
    read_scales(begin);  // as they were rounded
    for (int64_t lane = 0; lane < count_; ++lane) {
      divisor_[lane] = scale_[lane] > 0.0f ? scale_[lane] : std::bit_cast<float>(0x7f800000);
    }
  }

  void read_scales(int64_t entry) {
    scales_at(entry, 0).read(scale_);
    scales_at(entry, codes_.least_offset).read(least_);
  }

  // Adds the codes of an entry to their words, which it stores once they are full.
  void add_codes(int64_t entry) {
    constexpr float kMagic = 0x1.8p23f;  // its last place is 1
    float numbers[kLanesTogether];
    const float most = largest_code();
    const int64_t place = entry % codes_in_word(), shift = place * codes_.bits;
    if (place == 0) std::fill_n(words_of_lanes_, kLanesTogether, 0u);
    read_finite(entry, numbers);
    for (int64_t lane = 0; lane < count_; ++lane) {
      float code = (numbers[lane] - least_[lane]) / divisor_[lane];
      code = code > 0.0f ? code : 0.0f;  // NaN, too
      code = code < most ? code : most;
      words_of_lanes_[lane] |= (std::bit_cast<uint32_t>(code + kMagic) - std::bit_cast<uint32_t>(kMagic)) << shift;
    }
    if (place + 1 < codes_in_word()) return;
    for (int64_t lane = 0; lane < count_; ++lane) word(entry, lane) = words_of_lanes_[lane];
  }

  const AffineCodes& codes_;
  char* const numbers_;
  char* const words_;
  char* const scales_;
  const int64_t count_;
  float scale_[kLanesTogether];
  float least_[kLanesTogether];
  float divisor_[kLanesTogether];
  uint32_t words_of_lanes_[kLanesTogether];
};

template <typename Convert>
void for_each_lanes(const AffineCodes& codes, int64_t num_threads, Convert convert) {
  const int64_t chunks = (codes.num_lanes + kLanesTogether - 1) / kLanesTogether, units = codes.num_matrices * chunks;
  const auto numbers = static_cast<double>(codes.num_matrices * codes.num_entries * codes.num_lanes);
  num_threads = std::min(worthwhile_threads(numbers / kAffinePerUs, num_threads), std::max<int64_t>(1, units));
  parallel_for(units, num_threads, [&](int64_t unit, int64_t) noexcept {
    LaneCodec lanes(codes, unit / chunks, unit % chunks * kLanesTogether);
    convert(lanes);
  });
}

}  // namespace

void quantize_affine(const AffineCodes& codes, int64_t num_threads) noexcept {
  for_each_lanes(codes, num_threads, [](LaneCodec& lanes) { lanes.quantize(); });
}

void dequantize_affine(const AffineCodes& codes, int64_t num_threads) noexcept {
  for_each_lanes(codes, num_threads, [](LaneCodec& lanes) { lanes.dequantize(); });
}

}  // namespace pagecore::cpu
