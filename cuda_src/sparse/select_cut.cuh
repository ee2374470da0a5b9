// The cut of a selection: the score from which on keys are selected, found by a radix select in one block of threads.
//
//   order key   | 11 bits | 11 bits | 10 bits |      larger keys are better; NaN and -infinity are 0
//
// Each digit takes a histogram of the keys that agree with the digits before it, and a scan from the largest bin down.
// Keys are read from device memory for the first digit. A row of up to PC_SELECT_HELD keys is held in shared memory
// from then on; of a longer row the keys with the first digit are, if there are not more.
#pragma once

#include "cuda_src/abi/sparse.h"
#include "cuda_src/device/block_sums.cuh"
#include "cuda_src/device/numbers.cuh"

namespace pagecore {

// The order of floats as that of integers, as on the host.
PC_DEVICE pc_uint32 order_key(float score) {
  const pc_uint32 bits = pc_float_to_bits(score + 0.0f);  // -0 becomes 0
  const pc_uint32 sign = (bits >> 31) * 0xffffffffu;
  return score > -pc_infinity() ? bits ^ (sign | 0x80000000u) : 0;
}

// The shared memory of a selection.
struct SelectShared {
  PC_MEMBER explicit SelectShared(const Shared<pc_uint8>& buffer)
      : bins(buffer.as<int>()),
        totals((buffer + 4 * PC_SELECT_BINS).as<pc_int64>()),
        words(buffer.as<int>() + (PC_SELECT_BINS + PC_SELECT_SCRATCH / 2)),
        held(buffer.as<pc_uint32>() + (PC_SELECT_BINS + PC_SELECT_SCRATCH)),
        pairs((buffer + PC_SELECT_SHARED_BYTES).as<pc_uint64>()) {}

  Shared<int> bins;         // [PC_SELECT_BINS]
  Shared<pc_int64> totals;  // of the warps, in a scan
  Shared<int> words;        // [PC_SELECT_SCRATCH / 2]
  Shared<pc_uint32> held;   // [PC_SELECT_HELD]
  Shared<pc_uint64> pairs;  // ranked selections: key and inverted position
};

// The keys of a row: in device memory, or held.
struct SelectKeys {
  Global<float> scores;
  Shared<pc_uint32> held;
  int count;
  bool is_held;

  PC_MEMBER pc_uint32 at(int i) const { return is_held ? held.load(i) : order_key(scores.load(i)); }
};

struct Cut {
  pc_uint32 key;  // larger keys are selected
  int equal;      // and this number of the first equal ones
};

// The digit of a cut, and the number of keys that are still wanted among those with this digit.
struct CutDigit {
  int digit;
  int wanted;
  int count;  // keys with this digit
};

PC_DEVICE void clear_bins(const SelectShared& shared) {
  for (int i = pc_thread(); i < PC_SELECT_BINS; i += pc_num_threads()) shared.bins.store(i, 0);
  pc_sync_block();  // fault: select_barrier_after_clearing
}

// Finds the digit of which larger ones have fewer than `wanted` keys in the bins, and this one enough; else digit 0.
PC_DEVICE CutDigit find_digit(const SelectShared& shared, int wanted) {
  constexpr int kEach = PC_SELECT_BINS / PC_SELECT_THREADS;
  pc_sync_block();  // fault: select_barrier_before_bins
  int own[kEach], sum = 0;
  PC_UNROLL
  for (int i = 0; i < kEach; ++i) {
    own[i] = shared.bins.load(pc_thread() * kEach + i);
    sum += own[i];
  }
  pc_int64 total;
  const pc_int64 before = BlockScan<PC_SELECT_THREADS>(shared.totals).exclusive_sum(sum, total);
  int above = static_cast<int>(total - before) - sum;
  const bool none = total < wanted && pc_thread() == 0;
  if (none || (above < wanted && wanted <= above + sum)) {
    bool found = false;
    PC_UNROLL
    for (int i = kEach - 1; i >= 0; --i) {
      if (found) break;
      found = i == 0 || (!none && above + own[i] >= wanted);
      if (found) {
        shared.words.store(0, pc_thread() * kEach + i);
        shared.words.store(1, wanted - above);
        shared.words.store(2, own[i]);
      }
      above += own[i];
    }
  }
  pc_sync_block();  // fault: select_barrier_after_digit
  return {shared.words.load(0), shared.words.load(1), shared.words.load(2)};
}

// Counts the digits at `shift` of the keys whose higher bits are those of `prefix`.
PC_DEVICE void count_digits(const SelectShared& shared, const SelectKeys& keys, int shift, int bits, pc_uint32 prefix) {
  const int higher = shift + bits;
  for (int i = pc_thread(); i < keys.count; i += pc_num_threads()) {
    const pc_uint32 key = keys.at(i);
    if (higher < 32 && key >> (higher & 31) != prefix >> (higher & 31)) continue;
    shared.bins.atomic_add(static_cast<int>(key >> shift & ((1u << bits) - 1)), 1);
  }
}

// Counts the first digits, and holds the keys if there is room for all.
PC_DEVICE void count_first_digits(const SelectShared& shared, const SelectKeys& keys, bool holds) {
  constexpr int kInFlight = 8;
  const int step = pc_num_threads();
  for (int first = pc_thread(); first < keys.count; first += kInFlight * step) {
    float scores[kInFlight];
    PC_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      scores[k] = first + k * step < keys.count ? keys.scores.load(first + k * step) : 0.0f;
    }
    PC_UNROLL
    for (int k = 0; k < kInFlight; ++k) {
      if (first + k * step >= keys.count) break;
      const pc_uint32 key = order_key(scores[k]);
      if (holds) keys.held.store(first + k * step, key);
      shared.bins.atomic_add(static_cast<int>(key >> 21), 1);
    }
  }
}

// Holds the keys of a long row that have the first digit, in any order; returns them.
PC_DEVICE SelectKeys hold_digit(const SelectShared& shared, const SelectKeys& keys, const CutDigit& digit) {
  if (pc_thread() == 0) shared.words.store(3, 0);
  pc_sync_block();  // fault: select_barrier_before_holding
  for (int i = pc_thread(); i < keys.count; i += pc_num_threads()) {
    const pc_uint32 key = keys.at(i);
    if (static_cast<int>(key >> 21) == digit.digit) keys.held.store(shared.words.atomic_add(3, 1), key);
  }
  return {keys.scores, keys.held, digit.count, true};
}

// Finds the cut that selects `budget` of the keys, or all that can be selected. Sets keys.is_held if the whole row is
// held afterwards.
PC_DEVICE Cut find_cut(const SelectShared& shared, SelectKeys& keys, int budget) {
  const bool holds = keys.count <= PC_SELECT_HELD;
  clear_bins(shared);
  count_first_digits(shared, keys, holds);
  CutDigit digit = find_digit(shared, budget);
  keys.is_held = holds;
  pc_uint32 prefix = static_cast<pc_uint32>(digit.digit) << 21;
  SelectKeys rest = keys;
  clear_bins(shared);
  if (!holds && digit.count <= PC_SELECT_HELD) {
    rest = hold_digit(shared, keys, digit);
    pc_sync_block();  // fault: select_barrier_after_holding
  }
  count_digits(shared, rest, 10, 11, prefix);
  digit = find_digit(shared, digit.wanted);
  prefix |= static_cast<pc_uint32>(digit.digit) << 10;
  clear_bins(shared);
  count_digits(shared, rest, 0, 10, prefix);
  digit = find_digit(shared, digit.wanted);
  return {prefix | static_cast<pc_uint32>(digit.digit), digit.wanted};
}

}  // namespace pagecore
