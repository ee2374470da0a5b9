// The rows of a tile of prefill.cu that are in sealed blocks: their words and scales in shared memory, and the numbers
// that these become. Codes of keys and of values have 2 or 4 bits each.
//
//   keys, of a quarter       SealedKeys                   words and scales of 16 tokens
//   values, of a tile        [tokens][kValueDim / 8]      words of 16 or 8 channels; of 2 bits half of a row
//                            [tokens][kValueDim / 16][2]  4 bytes each: groups have 16 channels or more
//
// Of keys, dims past those of the call have words and scales of zero, and are unpacked to zeros. Of values, they are
// not copied, and zeros are stored.
//
// For 256 dims 99 KiB have no room for words and scales: they are copied to the first half of the rows that they are
// unpacked to. Those of keys are then moved to the rows of values, which are not needed at that time; those of values
// are loaded by all threads before the first row is stored. In registers, those of keys would spill.
#pragma once

#include "cuda_src/abi/sealed.h"
#include "cuda_src/attention/prefill/feed.cuh"
#include "cuda_src/attention/tiles/sealed_numbers.cuh"

namespace pagecore {

template <typename T, int kDim, typename ScoreOptions, int kValueDim>
struct PrefillSealedTile : PrefillTile<T, kDim, ScoreOptions, kValueDim, 0, true> {
  using Base = PrefillTile<T, kDim, ScoreOptions, kValueDim, 0, true>;
  static constexpr bool kInPlace = Base::kShape.unpacks_in_place();
  using Keys = SealedKeys<kDim>;                // of a quarter
  static constexpr int kPitch = kValueDim / 2;  // bytes, of a row of words, and of one of scales, of values
  static constexpr int kScalesBegin = Base::kTokens * kPitch;  // of values
  // Tokens of a chunk of 8 dims that a thread unpacks: of keys adjacent tokens, of values every kRowStep-th.
  static constexpr int kOwn = Base::kTokens * Base::kLanes / Base::kThreads;
  static constexpr int kRowStep = Base::kThreads / Base::ValueRow::kLanes;

  static_assert(Base::kTokens % 16 == 0 && 8 % kOwn == 0, "a thread has keys of one word of each channel");
  static_assert(kPitch % 16 == 0, "rows are whole units of cp.async");
  // The rows after a sealed quarter are copied from the caches while its words and scales are.
  static_assert(!kInPlace || kScalesBegin + 16 * kPitch <= 16 * Base::ValueRow::kBytes,
                "words and scales of a quarter of values take no more than its rows");
  static_assert(!kInPlace || Keys::kBytes <= 16 * Base::KeyRow::kBytes,
                "words and scales of a quarter of keys take no more than its rows");
  static_assert(!kInPlace || Keys::kBytes <= 16 * Base::ValueRow::kBytes,
                "the rows of values have room for words and scales of keys");
};

// Words and scales of a tile, and the rows that they are unpacked to.
template <typename Tile>
class SealedRows {
  using T = typename Tile::Element;

 public:
  PC_MEMBER explicit SealedRows(const Shared<pc_uint8>& shared) : shared_(shared) {}

  // Words and scales that have been copied, of keys and of values.
  PC_MEMBER Shared<pc_uint8> packed_keys() const {
    return shared_ + (Tile::kInPlace ? Tile::kShape.keys_begin() : Tile::kShape.sealed_begin());
  }
  PC_MEMBER Shared<pc_uint8> packed_values() const {
    return shared_ + (Tile::kInPlace ? Tile::kShape.values_begin() : Tile::kShape.sealed_begin());
  }

  // Unpacks the keys of the first `rows` tokens. A thread has a chunk of kOwn adjacent tokens: each word holds a
  // channel of all of them.
  PC_MEMBER void unpack_keys(const PcSealedPlane& key, int rows) const {
    using Row = typename Tile::KeyRow;
    using Keys = typename Tile::Keys;
    if (Tile::kInPlace) move_packed_keys(key, rows);
    const Shared<pc_uint8> source = Tile::kInPlace ? shared_ + Tile::kShape.values_begin() : packed_keys();
    const int thread = pc_opaque(pc_thread());
    const int first_row = thread / Tile::kLanes * Tile::kOwn, chunk = thread % Tile::kLanes;
    if (first_row >= rows || 32 * chunk >= Keys::kRowBytes) return;
    const Shared<pc_uint8> quarter = source + first_row / 16 * Keys::kBytes;
    const int bit = first_row % 16 * key.bits;
    const Shared<pc_uint32> words = (quarter + bit / 32 * Keys::kRowBytes).template as<pc_uint32>();
    float scale[8], least[8];
    load_eight(key.scale_type, quarter + 2 * Keys::kRowBytes, 8 * chunk, scale);
    load_eight(key.scale_type, quarter + 3 * Keys::kRowBytes, 8 * chunk, least);
    const pc_vector a = words.load_vector(8 * chunk), b = words.load_vector(8 * chunk + 4);
    pc_uint32 word[8];
    PC_UNROLL
    for (int i = 0; i < 8; ++i) word[i] = (i < 4 ? a.word[i] : b.word[i - 4]) >> bit % 32;
    PC_UNROLL
    for (int t = 0; t < Tile::kOwn; ++t) {
      float x[8];
      PC_UNROLL
      for (int i = 0; i < 8; ++i) x[i] = next_number(word[i], key.bits, {scale[i], least[i]});
      shared_.store_vector(Tile::kShape.keys_begin() + Row::at(first_row + t, chunk), packed(x));
    }
  }

  // Unpacks the values of the first `rows` tokens. In place, a thread loads all of its words before it stores a row.
  PC_MEMBER void unpack_values(const PcSealedPlane& value, int dim, int rows) const {
    using Row = typename Tile::ValueRow;
    constexpr int kAtOnce = Tile::kInPlace ? Tile::kTokens / Tile::kRowStep : 1;
    const int thread = pc_opaque(pc_thread()), chunk = thread % Row::kLanes;
    const int end = chunk < Row::kChunks ? rows : 0;
    const bool exists = 8 * chunk < dim;
    const Shared<pc_uint8> words = packed_values() + chunk * value.bits / 4 * 4;
    const Shared<pc_uint8> scales = packed_values() + Tile::kScalesBegin;
    const int shift = chunk * value.bits % 4 * 8, first_scale = 8 * chunk / value.group * 2;
    PC_NO_UNROLL
    for (int first = thread / Row::kLanes; first < (Tile::kInPlace ? Tile::kTokens : rows);
         first += kAtOnce * Tile::kRowStep) {
      pc_uint32 word[kAtOnce] = {};
      ScalePair pair[kAtOnce] = {};
      PC_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + i * Tile::kRowStep;
        if (row >= end || !exists) continue;
        word[i] = words.template as<pc_uint32>().load(row * Tile::kPitch / 4) >> shift;
        load_two(value.scale_type, scales + row * Tile::kPitch, first_scale, pair[i].scale, pair[i].least);
      }
      if (Tile::kInPlace) pc_sync_block();  // fault: prefill_sealed_barrier_in_values
      PC_UNROLL
      for (int i = 0; i < kAtOnce; ++i) {
        const int row = first + i * Tile::kRowStep;
        if (row >= end) continue;  // fault: prefill_sealed_values_past_dims
        float x[8];
        PC_UNROLL
        for (int j = 0; j < 8; ++j) x[j] = next_number(word[i], value.bits, pair[i]);
        shared_.store_vector(Tile::kShape.values_begin() + Row::at(row, chunk), packed(x));
      }
    }
  }

 private:
  // Moves words and scales of keys to the rows of values.
  PC_MEMBER void move_packed_keys(const PcSealedPlane& key, int rows) const {
    using Keys = typename Tile::Keys;
    const Shared<pc_uint8> target = shared_ + Tile::kShape.values_begin();
    PC_NO_UNROLL
    for (int at = pc_opaque(pc_thread()); at < rows / 16 * Keys::kUnits; at += Tile::kThreads) {
      if (!Keys::has_unit(key, at % Keys::kUnits)) continue;
      target.store_vector(16 * at, packed_keys().load_vector(16 * at));
    }
    pc_sync_block();  // fault: prefill_sealed_barrier_in_keys
  }

  // Eight adjacent numbers of up to 4 bytes.
  PC_MEMBER static void load_eight(PcFloat type, const Shared<pc_uint8>& row, int at, float (&x)[8]) {
    PC_UNROLL
    for (int i = 0; i < 8; i += 2) load_two(type, row, at + i, x[i], x[i + 1]);
  }

  // The number of the lowest code of a word, which is removed.
  PC_MEMBER static float next_number(pc_uint32& word, int bits, const ScalePair& pair) {
    const pc_uint32 code = word & ((1u << bits) - 1);
    word >>= bits;
    return in_range_of<T>(number_of_code(code, pair));
  }
  PC_MEMBER static pc_vector packed(const float (&x)[8]) {
    return {{pc_pack<T>(x[0], x[1]), pc_pack<T>(x[2], x[3]), pc_pack<T>(x[4], x[5]), pc_pack<T>(x[6], x[7])}};
  }

  Shared<pc_uint8> shared_;
};

}  // namespace pagecore
