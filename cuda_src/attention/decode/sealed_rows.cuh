// Rows of decode.cu over sealed blocks: the products of a sealed tile.
//
// S = Q K^T: with key = least + code * scale a product is q * least + (q * scale) * code, and the codes of a fragment
// are bits of bfloat16, which holds them exactly next to an offset:
//
//   bfloat16   0 10000011 cccc 000    16 + code, codes of 4 bits
//              0 10000001 cc 00000     4 + code, codes of 2 bits
//
// q * scale becomes two bfloat16 terms, which together keep 16 bits of its mantissa and have the range of float32. The
// sum of q * (least - offset * scale) is float32, for the tile.
//
// O += P V: a lane unpacks the values of its fragments in registers, and rounds them to T.
//
// Both products are compiled for codes of 2 and of 4 bits; all warps of a call take the same branch.
#pragma once

#include "cuda_src/attention/decode/sealed.cuh"

namespace pagecore {

template <typename Tile, typename ScoreOptions>
class SealedDecodeRows : public DecodeRows<Tile, ScoreOptions> {
  using Base = DecodeRows<Tile, ScoreOptions>;
  using T = typename Tile::Element;
  using KeyRow = typename Tile::KeyRow;

 public:
  PC_MEMBER explicit SealedDecodeRows(const Shared<pc_uint8>& shared) : Base(shared) {}

  PC_MEMBER void score(const PcAttentionParams& p, const ScoreRule& rule, const SealedStage& keys, int token) {
    if (!keys.is_sealed) return Base::score(p, rule, keys.tile, token);
    const PcSealedPlane& key = sealed_params(p).key;
    if (key.bits == 4) {
      multiply_codes<4>(key.scale_type, keys.tile);
    } else {
      multiply_codes<2>(key.scale_type, keys.tile);
    }
    this->transform(p, rule, token);
  }

  PC_MEMBER void accumulate(const PcAttentionParams& p, const SealedStage& values, int token) {
    if (!values.is_sealed) return Base::accumulate(p, values.tile, token);
    const Shared<pc_uint8> stage = values.tile + -Tile::kValuesBegin;
    const bool masks = (this->edge_ && this->several_) || (ScoreOptions::kFull && masks_all_keys(p));
    if (masks) accumulate_not_finite_codes(p, stage, token);
    if (sealed_params(p).value.bits == 4) {
      accumulate_codes<4>(p, stage);
    } else {
      accumulate_codes<2>(p, stage);
    }
  }

 private:
  // Code `place` of two words as two elements of bfloat16, plus the offset.
  template <int kBits>
  PC_MEMBER static pc_uint32 offset_codes(pc_uint64 words, int place) {
    constexpr int kLowest = 7 - kBits;  // bit of a code in the mantissa
    constexpr pc_uint32 kMask = ((1u << kBits) - 1) << kLowest;
    constexpr pc_uint32 kOffset = kBits == 4 ? 0x4180u : 0x4080u;
    const pc_uint64 low = static_cast<pc_uint32>(words), high = words >> 32;
    const int shift = place * kBits;
    const pc_uint32 a = static_cast<pc_uint32>((low << kLowest) >> shift);
    const pc_uint32 b = static_cast<pc_uint32>((high << kLowest) >> shift);
    return (pc_permute(a, b, 0x5410) & (kMask | kMask << 16)) | (kOffset | kOffset << 16);
  }

  // S = Q K^T of a sealed tile.
  template <int kBits>
  PC_MEMBER void multiply_codes(PcFloat type, const Shared<pc_uint8>& stage) {
    using Keys = typename Tile::Keys;
    constexpr float kOffset = kBits == 4 ? 16.0f : 4.0f;
    constexpr int kWordRows = kBits / 2;
    const int row = pc_lane() / 4, column = 2 * (pc_lane() % 4);
    const SharedAddress first_query = this->queries_.address(KeyRow::at(pc_lane() % 16, pc_lane() / 16));
    const Shared<pc_uint8> scales = stage + 2 * Keys::kRowBytes, least = scales + Keys::kRowBytes;
    float rest[2] = {0.0f, 0.0f};  // of the two rows: q * (least - offset * scale)
    PC_UNROLL
    for (int n = 0; n < 2; ++n) {
      PC_UNROLL
      for (int i = 0; i < 4; ++i) this->s_[n][i] = 0.0f;
    }
    PC_UNROLL
    for (int k = 0; k < Tile::kKeySteps; ++k) {
      pc_uint32 q[4], high[4], low[4];
      pc_load_matrices(q, KeyRow::right_of(first_query, 2 * k));
      float scale[4], base[4];  // of dims 16 * k + column, + 1, + 8, + 9
      PC_UNROLL
      for (int i = 0; i < 4; i += 2) {
        load_two(type, scales, 16 * k + 4 * i + column, scale[i], scale[i + 1]);
        load_two(type, least, 16 * k + 4 * i + column, base[i], base[i + 1]);
        base[i] = pc_fma(-kOffset, scale[i], base[i]);
        base[i + 1] = pc_fma(-kOffset, scale[i + 1], base[i + 1]);
      }
      PC_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int at = i / 2 * 2;
        const float x = low_of<T>(q[i]), y = high_of<T>(q[i]);
        rest[i % 2] = pc_fma(y, base[at + 1], pc_fma(x, base[at], rest[i % 2]));
        const float a = x * scale[at], b = y * scale[at + 1];
        high[i] = pc_pack<pc_bfloat16>(a, b);
        low[i] = pc_pack<pc_bfloat16>(a - low_of<pc_bfloat16>(high[i]), b - high_of<pc_bfloat16>(high[i]));
      }
      PC_UNROLL
      for (int n = 0; n < 2; ++n) {
        const Shared<pc_uint64> words = (stage + (kWordRows == 2 ? n : 0) * Keys::kRowBytes).template as<pc_uint64>();
        const int place = kWordRows == 2 ? row : 8 * n + row;
        const pc_uint32 b0 = offset_codes<kBits>(words.load((16 * k + column) / 2), place);
        const pc_uint32 b1 = offset_codes<kBits>(words.load((16 * k + column) / 2 + 4), place);
        pc_multiply<pc_bfloat16>(this->s_[n], high, b0, b1);
        pc_multiply<pc_bfloat16>(this->s_[n], low, b0, b1);  // fault: sealed_low_terms
      }
    }
    PC_UNROLL
    for (int r = 0; r < 2; ++r) {
      rest[r] += pc_shuffle_xor(rest[r], 1);
      rest[r] += pc_shuffle_xor(rest[r], 2);
      PC_UNROLL
      for (int n = 0; n < 2; ++n) {
        this->s_[n][2 * r] += rest[r];
        this->s_[n][2 * r + 1] += rest[r];
      }
    }
  }

  PC_MEMBER static ScalePair load_pair(PcFloat type, const Shared<pc_uint8>& stage, int token, int group) {
    const Shared<pc_uint8> row = stage + (Tile::kValueScales + token * Tile::kScalePitch);
    ScalePair pair;
    load_two(type, row, 2 * group, pair.scale, pair.least);
    return pair;
  }

  // The value of code `place` of a word.
  PC_MEMBER static float value_of(pc_uint32 word, int place, int bits, const ScalePair& pair) {
    return number_of_code(word >> (place * bits) & ((1u << bits) - 1), pair);
  }

  PC_MEMBER static pc_uint32 load_word(const Shared<pc_uint8>& stage, int token, int word) {
    return (stage + (Tile::kValueWords + token * Tile::kValuePitch)).template as<pc_uint32>().load(word);
  }

  // O += P V of a sealed tile. Values past the dims have codes of zero, and are not written.
  template <int kBits>
  PC_MEMBER void accumulate_codes(const PcAttentionParams& p, const Shared<pc_uint8>& stage) {
    constexpr int kInWord = 32 / kBits;  // codes
    const PcSealedPlane& value = sealed_params(p).value;
    const int first = 2 * (pc_lane() % 4), column = pc_lane() / 4;
    const int tokens[4] = {first, first + 1, first + 8, first + 9};
    pc_uint32 weights[4], words[4] = {0, 0, 0, 0};
    pack_weights<T>(this->s_[0], this->s_[1], weights);
    ScalePair pairs[4] = {};
    int group = 0, end = 0;  // of the group whose pairs are loaded
    PC_UNROLL
    for (int n = 0; n < Tile::kValueTiles; ++n) {
      const bool begins_group = 8 * n >= end && 8 * n < p.value_dim;  // fault: sealed_scales_past_dims
      if (begins_group) {                                             // uniform
        PC_UNROLL
        for (int i = 0; i < 4; ++i) pairs[i] = load_pair(value.scale_type, stage, tokens[i], group);
        end += value.group;
        ++group;
      }
      const int place = kInWord == 8 ? column : 8 * (n % 2) + column;
      if (kInWord == 8 || n % 2 == 0) {
        PC_UNROLL
        for (int i = 0; i < 4; ++i) words[i] = load_word(stage, tokens[i], 8 * n / kInWord);
      }
      float v[4];
      PC_UNROLL
      for (int i = 0; i < 4; ++i) v[i] = in_range_of<T>(value_of(words[i], place, kBits, pairs[i]));
      pc_multiply<T>(this->o_[n], weights, pc_pack<T>(v[0], v[1]), pc_pack<T>(v[2], v[3]));
    }
  }

  // Returns a bit for each token of the tile with a scale or a least number that is infinite or NaN.
  PC_MEMBER static int find_not_finite(const PcSealedPlane& value, int groups, const Shared<pc_uint8>& stage) {
    int found = 0;
    for (int at = pc_lane(); at < Tile::kTokens * groups; at += 32) {
      const ScalePair pair = load_pair(value.scale_type, stage, at / groups, at % groups);
      const pc_uint32 exponents = 0x7f800000u;
      const bool scale = (pc_float_to_bits(pair.scale) & exponents) == exponents;
      const bool least = (pc_float_to_bits(pair.least) & exponents) == exponents;
      if (scale || least) found |= 1 << at / groups;
    }
    return or_of_warp(found);
  }

  // Adds the contributions of these tokens to the rows that attend to them, and replaces their scales by zeros.
  PC_MEMBER void accumulate_not_finite_codes(const PcAttentionParams& p, const Shared<pc_uint8>& stage, int token) {
    const PcSealedPlane& value = sealed_params(p).value;
    const int groups = p.value_dim / value.group, in_word = 32 / value.bits;
    const int found = find_not_finite(value, groups, stage);
    if (found == 0) return;
    const ScoreRow rows[2] = {this->score_rows_.load(pc_lane() / 4), this->score_rows_.load(pc_lane() / 4 + 8)};
    for (int t = 0; t < Tile::kTokens; ++t) {
      if ((found >> t & 1) == 0) continue;
      PC_UNROLL
      for (int r = 0; r < 2; ++r) {
        const float even = t < 8 ? this->s_[0][2 * r] : this->s_[1][2 * r];
        const float odd = t < 8 ? this->s_[0][2 * r + 1] : this->s_[1][2 * r + 1];
        const float weight = pc_shuffle(t % 2 == 0 ? even : odd, pc_lane() / 4 * 4 + t % 8 / 2);
        if (!attends<ScoreOptions>(p, rows[r], token + t)) continue;
        PC_UNROLL
        for (int n = 0; n < Tile::kValueTiles; ++n) {
          const int d = 8 * n + 2 * (pc_lane() % 4);
          if (8 * n >= p.value_dim) continue;  // fault: sealed_not_finite_past_dims
          const ScalePair pair = load_pair(value.scale_type, stage, t, d / value.group);
          const pc_uint32 word = load_word(stage, t, d / in_word);
          const float x = value_of(word, d % in_word, value.bits, pair);
          const float y = value_of(word, d % in_word + 1, value.bits, pair);
          this->o_[n][2 * r] = pc_fma(weight, x, this->o_[n][2 * r]);
          this->o_[n][2 * r + 1] = pc_fma(weight, y, this->o_[n][2 * r + 1]);
        }
      }
      pc_sync_warp();  // fault: sealed_barrier_before_zeros
      const Shared<pc_uint32> scales = (stage + (Tile::kValueScales + t * Tile::kScalePitch)).template as<pc_uint32>();
      for (int at = pc_lane(); at < Tile::kScalePitch / 4; at += 32) scales.store(at, 0);
    }
    pc_sync_warp();  // fault: sealed_barrier_after_zeros
  }
};

}  // namespace pagecore
