// Checkpoints of recurrent states: int8 codes with a scale for each key, and back.
//
//   matrix   [values, keys] of a slot; the numbers of a key are a column
//   unit     16 bytes of adjacent keys of a row; one key if the rows or addresses do not allow vectors
//   stretch  up to 32 units of a row; a block of 512 threads has one stretch of a matrix
//
//              units of a stretch
//            | 0 | 1 | ... | lanes - 1 |      lane l of group g has unit l of the rows
//     row 0  |   group 0               |      g, g + groups, g + 2 * groups, ...;
//     row 1  |   group 1               |      512 / lanes groups
//      ...
//
// Grid: stretches of all matrices of a slot; pairs of slots; planes. A thread has up to 8 rows in flight, and keeps
// them: a matrix of 128 x 128 is read once. Of matrices with more rows than that, quantize_states reads all rows a
// second time. Groups exchange the largest magnitudes of their keys, by shuffles within a warp and through shared
// memory between warps. Arithmetic is that of the host, so that codes and scales have the same bits.
#include "cuda_src/abi/states.h"
#include "cuda_src/device/units.cuh"

namespace pagecore {

constexpr int kRowsInFlight = 8;

template <typename T>
struct StateStretch {
  Global<T> state;  // the first row of the matrix
  Global<pc_uint8> codes;
  Global<T> scales;
  int first_key;
};

template <typename T>
PC_DEVICE StateStretch<T> stretch_of(const PcStateParams& params, int pair, int keys_per_lane) {
  const int plane = pc_block_z(), matrix = divide(pc_block_x(), params.stretches);
  const int stretch = pc_block_x() - matrix * params.stretches.divisor;
  const pc_int64 first_row = static_cast<pc_int64>(matrix) * params.num_values;
  const pc_int64 own = params.pairs[pair][0], coded = params.pairs[pair][1];  // fault: state_slots
  const Global<pc_uint8> state(params.states[plane]), codes(params.codes[plane]), scales(params.scales[plane]);
  return {(state + own * params.state_stride).as<T>() + first_row * params.num_keys,
          codes + (coded * params.codes_stride + first_row * params.num_keys),
          (scales + coded * params.scales_stride).as<T>() + static_cast<pc_int64>(matrix) * params.num_keys,
          (stretch << params.lanes_shift) * keys_per_lane};
}

// The rows and the keys of a thread.
struct StateLane {
  int lanes;
  int lane;
  int group;
  int groups;

  PC_MEMBER explicit StateLane(const PcStateParams& params)
      : lanes(1 << params.lanes_shift),
        lane(pc_thread() & (lanes - 1)),
        group(pc_thread() >> params.lanes_shift),
        groups(PC_STATE_THREADS >> params.lanes_shift) {}
};

// Returns the nearest integer, ties to even, of a quotient of magnitude up to 127; 0 for NaN.
PC_DEVICE pc_uint32 nearest_code(float x) {
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: its last place is 1
  const float number = x == x ? x < -127.0f ? -127.0f : x > 127.0f ? 127.0f : x : 0.0f;
  return (pc_float_to_bits(number + kMagic) - pc_float_to_bits(kMagic)) & 0xffu;
}

template <typename T, int Count>
PC_DEVICE void load_rows(const PcStateParams& params, const Global<T>& state, int first, int groups, int key,
                         Unit<T, Count> (&rows)[kRowsInFlight]) {
  PC_UNROLL
  for (int r = 0; r < kRowsInFlight; ++r) {
    const int row = first + r * groups;
    rows[r] = {};
    if (row < params.num_values && key < params.num_keys) {  // fault: state_rows
      rows[r] = load_unit<T, Count, false>(state, static_cast<pc_int64>(row) * params.num_keys + key);
    }
  }
}

// Takes the maxima of each key over the groups of a warp, then over the warps; stores scales of the stretch.
template <typename T, int Count>
PC_DEVICE void exchange_largest(const PcStateParams& params, const StateStretch<T>& at, const StateLane& mine,
                                pc_uint32 (&largest)[Count], const Shared<float>& scales) {
  const Shared<pc_uint32> of_warps = pc_shared_buffer().as<pc_uint32>();
  const int keys = mine.lanes * Count;
  for (int mask = mine.lanes; mask < 32; mask *= 2) {  // fault: state_groups
    PC_UNROLL
    for (int i = 0; i < Count; ++i) {
      const auto other = static_cast<pc_uint32>(pc_shuffle_xor(static_cast<int>(largest[i]), mask));
      if (other > largest[i]) largest[i] = other;
    }
  }
  if (pc_lane() < mine.lanes) {
    PC_UNROLL
    for (int i = 0; i < Count; ++i) of_warps.store(pc_warp() * keys + mine.lane * Count + i, largest[i]);
  }
  pc_sync_block();  // fault: state_maxima
  for (int key = pc_thread(); key < keys; key += PC_STATE_THREADS) {
    pc_uint32 bits = 0;
    for (int warp = 0; warp < PC_STATE_WARPS; ++warp) {
      const pc_uint32 of_warp = of_warps.load(warp * keys + key);
      if (of_warp > bits) bits = of_warp;
    }
    const T scale = pc_from_float<T>(pc_bits_to_float(bits) / 127.0f);
    scales.store(key, pc_to_float(scale));
    if (at.first_key + key < params.num_keys) at.scales.store(at.first_key + key, scale);
  }
  pc_sync_block();  // fault: state_scales
}

template <typename T, int Count>
PC_DEVICE void quantize_stretch(const PcStateParams& params, const StateStretch<T>& at) {
  const StateLane mine(params);
  const int key = at.first_key + mine.lane * Count, rows_at_once = mine.groups * kRowsInFlight;
  Unit<T, Count> rows[kRowsInFlight];
  pc_uint32 largest[Count] = {};  // bits of magnitudes: they have the order of the numbers, and NaN is above infinity
  PC_NO_UNROLL
  for (int first = mine.group; first - mine.group < params.num_values; first += rows_at_once) {
    load_rows(params, at.state, first, mine.groups, key, rows);
    PC_UNROLL
    for (int r = 0; r < kRowsInFlight; ++r) {
      PC_UNROLL
      for (int i = 0; i < Count; ++i) {
        const pc_uint32 bits = pc_float_to_bits(element(rows[r], i)) & 0x7fffffffu;
        if (bits > largest[i]) largest[i] = bits;
      }
    }
  }
  const Shared<float> scales = pc_shared_buffer().as<float>() + PC_STATE_WARPS * PC_STATE_MAX_KEYS;
  exchange_largest<T, Count>(params, at, mine, largest, scales);
  float scale[Count];
  PC_UNROLL
  for (int i = 0; i < Count; ++i) scale[i] = scales.load(mine.lane * Count + i);
  PC_NO_UNROLL
  for (int first = mine.group; first - mine.group < params.num_values; first += rows_at_once) {
    const bool are_held = params.num_values <= rows_at_once;
    if (!are_held) load_rows(params, at.state, first, mine.groups, key, rows);  // fault: state_reload
    PC_UNROLL
    for (int r = 0; r < kRowsInFlight; ++r) {
      const int row = first + r * mine.groups;
      if (row >= params.num_values || key >= params.num_keys) continue;
      Unit<pc_uint8, Count> codes = {};
      PC_UNROLL
      for (int i = 0; i < Count; ++i) codes.word[i / 4] |= nearest_code(element(rows[r], i) / scale[i]) << 8 * (i % 4);
      store_unit(at.codes, static_cast<pc_int64>(row) * params.num_keys + key, codes);
    }
  }
}

template <typename T, int Count>
PC_DEVICE void dequantize_stretch(const PcStateParams& params, const StateStretch<T>& at) {
  const StateLane mine(params);
  const int key = at.first_key + mine.lane * Count;
  if (key >= params.num_keys) return;  // fault: state_keys
  const Unit<T, Count> scales = load_unit<T, Count, false>(at.scales, key);
  PC_NO_UNROLL
  for (int first = mine.group; first < params.num_values; first += mine.groups * kRowsInFlight) {
    Unit<pc_uint8, Count> codes[kRowsInFlight];
    load_rows(params, at.codes, first, mine.groups, key, codes);
    PC_UNROLL
    for (int r = 0; r < kRowsInFlight; ++r) {
      const int row = first + r * mine.groups;
      if (row >= params.num_values) continue;
      float numbers[Count];
      PC_UNROLL
      for (int i = 0; i < Count; ++i) {
        const auto code = static_cast<signed char>(codes[r].word[i / 4] >> 8 * (i % 4) & 0xffu);
        numbers[i] = static_cast<float>(code) * element(scales, i);
      }
      store_unit(at.state, static_cast<pc_int64>(row) * params.num_keys + key, unit_of<T>(numbers));
    }
  }
}

template <typename T>
PC_KERNEL(PC_STATE_THREADS, 2)
void quantize_states(const PcStateParams params) {
  constexpr int kCount = PC_STATE_BYTES / static_cast<int>(sizeof(T));
  const int pair = pc_block_y();
  if (params.in_units != 0) return quantize_stretch<T, kCount>(params, stretch_of<T>(params, pair, kCount));
  quantize_stretch<T, 1>(params, stretch_of<T>(params, pair, 1));
}

template <typename T>
PC_KERNEL(PC_STATE_THREADS, 2)
void dequantize_states(const PcStateParams params) {
  constexpr int kCount = PC_STATE_BYTES / static_cast<int>(sizeof(T));
  const int pair = pc_block_y();
  if (params.in_units != 0) return dequantize_stretch<T, kCount>(params, stretch_of<T>(params, pair, kCount));
  dequantize_stretch<T, 1>(params, stretch_of<T>(params, pair, 1));
}

}  // namespace pagecore
