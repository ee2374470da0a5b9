// Stored formats in decode.cu: rings of codes and scales, which a warp unpacks to the 16-bit tiles that it multiplies.
//
//   ring     [stages][key codes, value codes, key scales, value scales]    8 or 4 bits a number: 2 or 4 times as many
//              |                                                           tokens in flight as of a 16-bit cache
//              | a warp unpacks 16 keys, later 16 values: 8 numbers of a lane at a time
//              v
//   tile     [16, kDim] of T, rows as in decode_ring.cuh    ldmatrix
//
// Scales of groups are multiplied in while codes are unpacked, which rounds nothing. Scales of rows are exact only in
// float32: those of keys are factors of the columns of S, and those of values of the columns of P, relative to a power of
// two (`unit`) not below the largest scale so far, so that weights do not leave the range of halves.
#pragma once

#include "decode_rows.cuh"
#include "formats.cuh"
#include "stored_shape.h"
#include "units.cuh"

namespace pagecore {

template <typename T, int kBits, int kDim>
struct StoredTile {
  using Element = T;
  using KeyRow = TileRow<kDim>;
  using ValueRow = TileRow<kDim>;
  static constexpr PcStoredShape kShape = {kBits, kDim};
  static constexpr PcRingShape kRing = kShape.ring();
  static constexpr int kWarps = kRing.warps;
  static constexpr int kStages = kRing.stages;
  static constexpr int kTokens = 16;
  static constexpr int kKeySteps = kDim / 16;  // of matrix instructions
  static constexpr int kValues = kDim;
  static constexpr int kValueTiles = kDim / 8;  // of O
  static constexpr int kNumBits = kBits;
  static constexpr int kChunks = kDim / 8;  // of an unpacked row
  static constexpr int kCodeBytes = kShape.code_bytes();
  static constexpr int kScaleBytes = kShape.scale_bytes();
  static constexpr int kLanes = kCodeBytes / 16;   // lanes of a warp that copy the codes of a row
  static constexpr int kRowsAtOnce = 32 / kLanes;  // rows that a warp copies together
  static constexpr int kCopies = kTokens / kRowsAtOnce;
  static constexpr int kTileBytes = kShape.tile_bytes();
  static constexpr int kFactorsBegin = kRing.weights_begin() + kWarps * kTokens * 16;
  // O of a warp at the end of an item, in its unpacked tiles.
  static constexpr int kSumsStride = 2 * kTileBytes;
  PC_MEMBER static int sums_begin(int) { return kRing.queries_begin() + kTileBytes; }

  static_assert(kChunks == KeyRow::kChunks, "a row has no padding");
  static_assert(kRing.stage_bytes % 128 == 0, "unpacked rows begin at a multiple of 128");
  static_assert(kSumsStride >= kRing.warp_rows * kDim * 4, "the sums of an item fit in the unpacked tiles");
};

// Keys or values of a stage.
struct StoredPart {
  Shared<pc_uint8> codes;
  Shared<pc_uint8> scales;
  Shared<pc_uint8> tile;  // unpacked
  PcFormat format;
};

// A warp's ring of tiles, and the walk that fills it.
template <typename Tile>
class DecodeStoredRing {
 public:
  PC_MEMBER DecodeStoredRing(const PcStoredAttentionParams& p, const Shared<pc_uint8>& shared, const Heads& heads,
                             const WorkRange& work)
      : p_(p),
        ring_(shared + pc_warp() * Tile::kRing.ring_bytes()),
        tile_(shared + (Tile::sums_begin(0) + pc_warp() * Tile::kSumsStride)),
        slots_((shared + (Tile::kRing.slots_begin() + pc_warp() * Tile::kRing.slot_bytes())).template as<pc_address>()),
        scale_slots_((shared + (Tile::kRing.weights_begin() + pc_warp() * Tile::kTokens * 16)).template as<pc_address>()),
        walk_(shared + (Tile::kRing.walks_begin() + pc_warp() * PcRingShape::kWalkBytes)) {
    walk_.start(p.attention, work, 0, heads.count);
  }

  // Starts to fill a stage with the next tile, after a barrier of the warp. Commits exactly one group of copies, which
  // is empty if the warp has no keys in the round.
  PC_MEMBER void fill(const PcAttentionParams& p, int stage) {
    const WalkState state = walk_.state();
    const bool empty = state.rounds == 0 || !state.keys.overlaps(state.token, Tile::kTokens);
    if (!empty && pc_lane() < Tile::kTokens) {
      const Slot slot = walk_.slot(p);
      slots_.store(2 * pc_lane(), codes_at(p_.key, slot));
      slots_.store(2 * pc_lane() + 1, codes_at(p_.value, slot));
      if (p_.key.scales.data != 0) {
        scale_slots_.store(2 * pc_lane(), scales_at(p_.key, slot));
        scale_slots_.store(2 * pc_lane() + 1, scales_at(p_.value, slot));
      }
    }
    pc_sync_warp();  // fault: decode_stored_barrier_before_copies
    if (!empty) {
      copy_codes(p, stage, state);
      if (p_.key.scales.data != 0) copy_scales(p, stage, state);
    }
    pc_commit_copies();
    if (state.rounds != 0) walk_.advance(p, state);
  }

  PC_MEMBER StoredPart keys(int stage) const {
    const Shared<pc_uint8> codes = ring_ + stage * Tile::kRing.stage_bytes;
    return {codes, codes + 2 * Tile::kTokens * Tile::kCodeBytes, tile_, p_.key.format};
  }
  PC_MEMBER StoredPart values(int stage) const {
    const StoredPart keys = this->keys(stage);
    return {keys.codes + Tile::kTokens * Tile::kCodeBytes, keys.scales + Tile::kTokens * Tile::kScaleBytes,
            keys.tile + Tile::kTileBytes, keys.format};
  }

  // Waits until the copies of the oldest tile are visible to the whole warp.
  PC_MEMBER void wait() const {
    pc_wait_copies<Tile::kStages - 1>();  // fault: decode_stored_wait
    pc_sync_warp();                       // fault: decode_stored_barrier_after_wait
  }

 private:
  PC_MEMBER static pc_address codes_at(const PcStored& stored, const Slot& slot) {
    const Global<pc_uint8> codes(stored.codes.data);
    return (codes + (slot_offset(stored.codes, slot) + pc_block_y() * stored.codes.head_stride)).address();
  }
  PC_MEMBER static pc_address scales_at(const PcStored& stored, const Slot& slot) {
    const PcScales& scales = stored.scales;
    return (Global<pc_uint8>(scales.data) + (slot.block * scales.block_stride + slot.offset * scales.token_stride +
                                             pc_block_y() * scales.head_stride))
        .address();
  }

  // A lane copies one chunk of every kRowsAtOnce-th row, of keys and of values; zeros past the dims of the call.
  PC_MEMBER void copy_codes(const PcAttentionParams& p, int stage, const WalkState& state) const {
    const int first_row = pc_lane() / Tile::kLanes, byte = pc_lane() % Tile::kLanes * 16;
    const SharedAddress first = keys(stage).codes.address(first_row * Tile::kCodeBytes + byte);
    const KeyRange own_keys = state.keys.only_if(byte < p.head_dim * Tile::kNumBits / 8);     // fault: stored_keys_past_dims
    const KeyRange own_values = state.keys.only_if(byte < p.value_dim * Tile::kNumBits / 8);  // fault: stored_values_past_dims
    pc_address key[Tile::kCopies], value[Tile::kCopies];
    PC_UNROLL
    for (int i = 0; i < Tile::kCopies; ++i) {
      key[i] = slots_.load(2 * (first_row + i * Tile::kRowsAtOnce));
      value[i] = slots_.load(2 * (first_row + i * Tile::kRowsAtOnce) + 1);
    }
    PC_UNROLL
    for (int i = 0; i < Tile::kCopies; ++i) {
      const int rows = i * Tile::kRowsAtOnce, token = state.token + first_row + rows;
      const SharedAddress target = first + rows * Tile::kCodeBytes;
      pc_copy_async(target, Global<pc_uint8>(key[i]), byte, own_keys.has(token));
      pc_copy_async(target + Tile::kTokens * Tile::kCodeBytes, Global<pc_uint8>(value[i]), byte, own_values.has(token));
    }
  }

  // A lane copies words of scales; zeros past those of the call and for tokens that the item does not have.
  PC_MEMBER void copy_scales(const PcAttentionParams& p, int stage, const WalkState& state) const {
    constexpr int kWords = Tile::kScaleBytes / 4;
    const int key_bytes = pc_scale_bytes(p_.key.format, p.head_dim);
    const int value_bytes = pc_scale_bytes(p_.value.format, p.value_dim);
    for (int at = pc_lane(); at < Tile::kTokens * kWords; at += 32) {
      const int row = at / kWords, byte = at % kWords * 4;
      const bool exists = state.keys.has(state.token + row);
      const SharedAddress target = keys(stage).scales.address(4 * at);
      const Global<pc_uint8> key(scale_slots_.load(2 * row)), value(scale_slots_.load(2 * row + 1));
      pc_copy_word_async(target, key, byte, exists && byte < key_bytes);
      pc_copy_word_async(target + Tile::kTokens * Tile::kScaleBytes, value, byte, exists && byte < value_bytes);
    }
  }

  const PcStoredAttentionParams& p_;
  Shared<pc_uint8> ring_;
  Shared<pc_uint8> tile_;  // unpacked keys, then unpacked values
  Shared<pc_address> slots_, scale_slots_;
  TileWalk<Tile::kTokens, Tile::kWarps> walk_;
};

// ---- unpacking

// Two codes, in the lowest bits of `codes`, as elements of T.
template <typename T, PcFormat kFormat>
PC_DEVICE pc_uint32 unpack_pair(pc_uint32 codes, const CodeScale& scale) {
  const pc_uint32 halves = halves_of_codes(kFormat, codes, scale.zero_point);
  if constexpr (kFormat == PC_FP4_BLOCK16 || kFormat == PC_MXFP8) {
    return pc_pack<T>(low_half(halves) * scale.factor, high_half(halves) * scale.factor);
  } else if constexpr (kFormat == PC_NVFP4) {
    return pc_fma_halves(halves, scale.halves, 0x80008000u);
  } else {
    return halves;
  }
}

// Unpacks chunk `at` of a tile, 8 numbers.
template <typename Tile, PcFormat kFormat>
PC_DEVICE void unpack_chunk(const StoredPart& part, int at) {
  using Row = typename Tile::KeyRow;
  constexpr int kGroup = pc_group_of(kFormat);
  const int row = at / Tile::kChunks, chunk = at % Tile::kChunks;
  pc_uint64 codes = 0;
  if constexpr (Tile::kNumBits == 8) {
    codes = part.codes.template as<pc_uint64>().load(at);
  } else {
    codes = part.codes.template as<pc_uint32>().load(at);
  }
  CodeScale scale = {1.0f, 0, 0};
  if constexpr (kGroup != 0) {
    scale = group_scale(kFormat, part.scales.load(row * Tile::kScaleBytes + chunk * 8 / kGroup));
  } else if constexpr (kFormat == PC_I4_TOKEN) {
    scale = row_scale(kFormat, part.scales.template as<pc_uint32>().load(row * (Tile::kScaleBytes / 4)));
  }
  pc_vector v;
  PC_UNROLL
  for (int k = 0; k < 4; ++k) {
    const pc_uint32 pair = static_cast<pc_uint32>(codes >> (2 * Tile::kNumBits * k));
    v.word[k] = unpack_pair<typename Tile::Element, kFormat>(pair, scale);
  }
  part.tile.store_vector(Row::at(row, chunk), v);
}

// A lane loads the codes of kAhead chunks before it stores any.
template <typename Tile, PcFormat kFormat>
PC_DEVICE void unpack_tile(const StoredPart& part) {
  constexpr int kAhead = 4;
  PC_NO_UNROLL
  for (int first = pc_lane(); first < Tile::kTokens * Tile::kChunks; first += 32 * kAhead) {
    PC_UNROLL
    for (int i = 0; i < kAhead; ++i) unpack_chunk<Tile, kFormat>(part, first + 32 * i);
  }
}

template <typename Tile>
PC_DEVICE void unpack(const StoredPart& part) {
  if constexpr (IsSame<typename Tile::Element, pc_bfloat16>::kValue) {
    return unpack_tile<Tile, Tile::kNumBits == 8 ? PC_MXFP8 : PC_FP4_BLOCK16>(part);
  } else if constexpr (Tile::kNumBits == 4) {
    if (part.format == PC_NVFP4) return unpack_tile<Tile, PC_NVFP4>(part);
    return unpack_tile<Tile, PC_I4_TOKEN>(part);
  } else {
    if (part.format == PC_I8_TOKEN) return unpack_tile<Tile, PC_I8_TOKEN>(part);
    if (part.format == PC_E5M2) return unpack_tile<Tile, PC_E5M2>(part);
    return unpack_tile<Tile, PC_E4M3>(part);
  }
}

// ---- queries

// Converts the bfloat16 elements of a row, one vector of each lane, to halves, times a power of two for which the
// largest is at least 2^14 and below 2^15. Returns the factor that makes up for it.
PC_DEVICE float narrow_query(pc_vector& v) {
  int largest = 0;
  PC_UNROLL
  for (int k = 0; k < 4; ++k) {
    const int low = static_cast<int>(v.word[k] & 0x7fff), high = static_cast<int>(v.word[k] >> 16 & 0x7fff);
    largest = max_of(largest, max_of(low, high));
  }
  PC_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) largest = max_of(largest, pc_shuffle_xor(largest, mask));
  const int exponent = max_of(largest >> 7, 15);  // biased; both powers of two are normal
  const float power = pc_bits_to_float(static_cast<pc_uint32>(268 - exponent) << 23);
  PC_UNROLL
  for (int k = 0; k < 4; ++k) {
    v.word[k] = pc_pack<pc_half>(low_of<pc_bfloat16>(v.word[k]) * power, high_of<pc_bfloat16>(v.word[k]) * power);
  }
  return pc_bits_to_float(static_cast<pc_uint32>(exponent - 14) << 23);
}

// Loads the queries of an item, and the factor of each row. Rows past the rows of the item, and dims past head_dim,
// become 0. A warp has one row at a time, a lane one chunk.
template <typename Tile>
PC_DEVICE void load_stored_queries(const PcAttentionParams& p, const Heads& heads, const PcWorkItem& item, bool negate,
                                   const Shared<pc_uint8>& queries, const Shared<float>& factors) {
  using Row = typename Tile::KeyRow;
  const Global<pc_uint16> query(p.query.data);
  const int chunk = pc_lane();
  for (int row = pc_warp(); row < Tile::kRing.warp_rows; row += Tile::kWarps) {
    pc_vector v = {{0, 0, 0, 0}};
    float factor = 1.0f;
    if (row < item.query_count * heads.count && chunk * 8 < p.head_dim) {  // fault: stored_queries_past_dims
      const int query_row = item.query_begin + row / heads.count, head = heads.first + row % heads.count;
      v = query.load_vector(row_offset(p.query, query_row, head) + chunk * 8);
    }
    if (!IsSame<typename Tile::Element, pc_bfloat16>::kValue && p.query_type == PC_BFLOAT16) factor = narrow_query(v);
    for (int k = 0; k < 4; ++k) v.word[k] ^= negate ? 0x80008000u : 0;
    if (chunk < Tile::kChunks) queries.store_vector(Row::at(row, chunk), v);
    if (chunk == 0) factors.store(row, factor);
  }
}

// ---- rows

// The 16 rows of an item, and their sums over the tiles of one warp. O is relative to `unit_`.
template <typename Tile, typename Options>
class StoredRows : public DecodeRows<Tile, Options> {
  using Base = DecodeRows<Tile, Options>;

 public:
  PC_MEMBER StoredRows(const PcStoredAttentionParams& p, const Shared<pc_uint8>& shared)
      : Base(shared), p_(p), factors_((shared + Tile::kFactorsBegin).template as<float>()), unit_(1.0f) {}

  PC_MEMBER void load(const PcAttentionParams& p, const Heads& heads, const Sequence& sequence, const PcWorkItem& item,
                      bool negate) {
    load_stored_queries<Tile>(p, heads, item, negate, this->queries_, factors_);
    this->begin(p, heads, sequence, item);
    unit_ = pc_has_row_scale(p_.value.format) ? pc_bits_to_float(kLeastUnit) : 1.0f;
  }

  PC_MEMBER void score(const PcAttentionParams& p, const ScoreRule& rule, const StoredPart& keys, int token) {
    unpack<Tile>(keys);
    pc_sync_warp();  // fault: decode_stored_barrier_after_keys
    this->multiply(keys.tile);
    scale_scores(keys);
    this->transform(p, rule, token);
  }

  PC_MEMBER void accumulate(const PcAttentionParams& p, const StoredPart& values, int token) {
    unpack<Tile>(values);
    if (pc_has_row_scale(values.format)) scale_weights(p, values, token);
    pc_sync_warp();  // fault: decode_stored_barrier_after_values
    Base::accumulate(p, values.tile, token);
  }

  PC_MEMBER float low(int n, int r) const { return Base::low(n, r) * unit_; }
  PC_MEMBER float high(int n, int r) const { return Base::high(n, r) * unit_; }

 private:
  static constexpr pc_uint32 kLeastUnit = 0x00800000u, kLargestUnit = 0x7e800000u;  // powers of two with an inverse

  // The scale of the lane's column 2 * (lane % 4) + 8 * n + e of the tile.
  PC_MEMBER static float column_scale(const StoredPart& part, int n, int e) {
    const int row = 8 * n + 2 * (pc_lane() % 4) + e;
    return row_scale(part.format, part.scales.template as<pc_uint32>().load(row * (Tile::kScaleBytes / 4))).factor;
  }

  PC_MEMBER void scale_scores(const StoredPart& keys) {
    const float of_rows[2] = {factors_.load(pc_lane() / 4), factors_.load(pc_lane() / 4 + 8)};
    PC_UNROLL
    for (int n = 0; n < 2; ++n) {
      PC_UNROLL
      for (int i = 0; i < 4; ++i) this->s_[n][i] *= of_rows[i / 2];
    }
    if (!pc_has_row_scale(keys.format)) return;
    PC_UNROLL
    for (int n = 0; n < 2; ++n) {
      const float scales[2] = {column_scale(keys, n, 0), column_scale(keys, n, 1)};
      PC_UNROLL
      for (int i = 0; i < 4; ++i) this->s_[n][i] *= scales[i % 2];
    }
  }

  // Multiplies the weights, but not their sums, by the scales of values. A key that a row does not attend to has a weight
  // of 0, which must remain 0 if the scale is NaN.
  PC_MEMBER void scale_weights(const PcAttentionParams& p, const StoredPart& values, int token) {
    float scales[2][2];
    float largest = 0.0f;
    PC_UNROLL
    for (int n = 0; n < 2; ++n) {
      PC_UNROLL
      for (int e = 0; e < 2; ++e) {
        scales[n][e] = column_scale(values, n, e);
        largest = pc_max(largest, pc_max(scales[n][e], -scales[n][e]));
      }
    }
    largest = pc_max(largest, pc_shuffle_xor(largest, 1));
    largest = pc_max(largest, pc_shuffle_xor(largest, 2));
    raise_unit(largest);
    const float inverse = pc_bits_to_float((254u << 23) - pc_float_to_bits(unit_));
    const bool masks = (this->edge_ && this->several_) || (Options::kFull && p.mask != 0);
    PC_UNROLL
    for (int n = 0; n < 2; ++n) {
      PC_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float weight = this->s_[n][i] * (scales[n][i % 2] * inverse);
        this->s_[n][i] = masks && !this->attends_to(p, i / 2, token + 8 * n + 2 * (pc_lane() % 4) + i % 2) ? 0 : weight;
      }
    }
  }

  // Makes the unit a power of two that is not below `largest`, unless it already is, and rescales O.
  PC_MEMBER void raise_unit(float largest) {
    const pc_uint32 power = (pc_float_to_bits(largest) + 0x7fffffu) & 0x7f800000u;
    if (power <= pc_float_to_bits(unit_)) return;
    const float unit = pc_bits_to_float(power < kLargestUnit ? power : kLargestUnit);
    const float rescale = unit_ * pc_bits_to_float((254u << 23) - pc_float_to_bits(unit));
    unit_ = unit;
    this->rescale(rescale);
  }

  const PcStoredAttentionParams& p_;
  Shared<float> factors_;  // of the 16 rows of the item
  float unit_;
};

}  // namespace pagecore
