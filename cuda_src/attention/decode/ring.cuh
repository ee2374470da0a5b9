// The tiles of decode.cu: their layout in shared memory, and the copies that fill them.
#pragma once

#include "cuda_src/attention/tiles/warp_ring.cuh"

namespace pagecore {

// T: type of the elements. kDim, kValueDim: dims of keys and of values that the instance computes with.
template <typename T, int kDim, int kValueDim>
struct DecodeTile {
  using Element = T;
  using KeyRow = TileRow<kDim>;
  using ValueRow = TileRow<kValueDim>;
  static constexpr PcRingShape kRing = pc_decode_ring(kDim, kValueDim);
  static constexpr int kWarps = kRing.warps;
  static constexpr int kStages = kRing.stages;
  static constexpr int kTokens = 16;
  static constexpr int kKeySteps = kDim / 16;  // of matrix instructions
  static constexpr int kValues = kValueDim;
  static constexpr int kValueTiles = kValueDim / 8;  // of O
  // Rows of a stage, and the number of slots that a lane holds.
  using StoredKeyRow = KeyRow;
  using StoredValueRow = ValueRow;
  static constexpr int kValuesBegin = kTokens * KeyRow::kBytes;
  static constexpr int kAhead = KeyRow::kBytes <= 256 ? 8 : 4;
  PC_MEMBER static bool has_chunk(int chunk, int dim) { return chunk * 8 < dim; }
  // O of a warp at the end of an item, in the stage that was used last.
  static constexpr int kSumsStride = kRing.ring_bytes();
  PC_MEMBER static int sums_begin(int stage) { return stage * kRing.stage_bytes; }

  static_assert(kValueDim <= kDim, "the lanes that copy a row of keys are enough for one of values");
  static_assert(kRing.tile_tokens == kTokens, "a tile has the keys of one m16n8k16 of O += P V");
  static_assert(kRing.stage_bytes == kValuesBegin + kTokens * ValueRow::kBytes,
                "a stage is a tile of keys and of values");
  static_assert(kRing.stage_bytes >= kRing.warp_rows * kValueDim * 4, "the sums of an item fit in a stage");
};

// A warp's ring of tiles, and the walk that fills it.
template <typename Tile>
class DecodeRing : public WarpRing<DecodeRing<Tile>, Tile> {
  using Base = WarpRing<DecodeRing<Tile>, Tile>;
  using T = typename Tile::Element;

 public:
  static constexpr bool kAllLanesLocate = false;

  PC_MEMBER DecodeRing(const PcAttentionParams& p, const Shared<pc_uint8>& shared, const Heads& heads,
                       const WorkRange& work)
      : Base(shared), stages_(Base::keys(0, pc_warp())), key_(p.key.data), value_(p.value.data) {
    key_ = key_ + heads.kv * p.key.head_stride;
    value_ = value_ + heads.kv * p.value.head_stride;
    this->start_walk(p, work, 0, heads.count);
  }

  PC_MEMBER void locate(const PcAttentionParams& p, const WalkState& /*state*/, int /*stage*/) const {
    const Slot slot = this->slot(p);
    this->store_address(this->slots(), 0, (key_ + slot_offset(p.key, slot)).address());
    this->store_address(this->slots(), 1, (value_ + slot_offset(p.value, slot)).address());
  }

  PC_MEMBER void copy(const PcAttentionParams& p, const WalkState& state, int stage) const {
    copy_rows<Tile>(p, state, this->slots(), keys(stage), values(stage));
  }

  PC_MEMBER Shared<pc_uint8> keys(int stage) const { return stages_ + stage * Tile::kRing.stage_bytes; }
  PC_MEMBER Shared<pc_uint8> values(int stage) const { return keys(stage) + Tile::kValuesBegin; }

 private:
  Shared<pc_uint8> stages_;  // of the warp; computing it for each stage takes up to 4 registers more
  Global<T> key_, value_;    // of the head
};

}  // namespace pagecore
