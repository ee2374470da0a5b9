// The ring of general.cu for sealed blocks: numbers become float32 when a stage is filled.
//
// Tokens of sealed blocks and of the caches may share a tile, because key heads can select tokens. A lane has the dims
// lane, lane + 32, ... of each token: 32 words of keys, or 32 numbers of a cache, are adjacent. It loads up to 8 codes
// or numbers, each with scale and least number, before it stores any. The threads wait for these loads.
#pragma once

#include "cuda_src/attention/general/ring.cuh"
#include "cuda_src/attention/inputs/sealed.cuh"
#include "cuda_src/device/floats.cuh"

namespace pagecore {

// The bits of a number in a tile, until it is used.
struct SealedBits {
  pc_uint32 bits;   // a word of codes, or a number of a cache
  pc_uint32 scale;  // of sealed numbers
  pc_uint32 least;
};

PC_DEVICE pc_uint32 load_bits(PcFloat type, const Global<pc_uint8>& at) {
  return type == PC_FLOAT32 ? at.as<pc_uint32>().load(0) : at.as<pc_uint16>().load(0);
}

PC_DEVICE float float_of_bits(PcFloat type, pc_uint32 bits) {
  if (type == PC_FLOAT32) return pc_bits_to_float(bits);
  return type == PC_FLOAT16 ? low_of<pc_half>(bits) : low_of<pc_bfloat16>(bits);
}

// Keys, or values, of one head.
template <bool kKeys>
struct SealedNumbers {
  const PcSealedPlane& sealed;
  const PcCache& cache;  // strides count elements
  PcFloat type;          // of the cache
  int dim;

  PC_MEMBER SealedBits load(const SealedSlot& slot, int d) const {
    if (!slot.is_sealed) {
      const pc_int64 at =
          slot.block * cache.block_stride + slot.offset * cache.token_stride + pc_block_y() * cache.head_stride + d;
      return {load_bits(type, Global<pc_uint8>(cache.data) + at * width_of(type)), 0, 0};
    }
    const int in_word = sealed.bits == 2 ? 16 : 8, size = width_of(sealed.scale_type);
    const pc_int64 row = kKeys ? slot.offset / in_word : slot.offset;
    const pc_int64 scales_row = kKeys ? slot.offset / sealed.group : slot.offset;
    const pc_int64 word = kKeys ? d : d / in_word;
    const pc_int64 scale = kKeys ? static_cast<pc_int64>(d) * size : d / sealed.group * sealed.group_stride;
    const Global<pc_uint8> words =
        Global<pc_uint8>(sealed.words) +
        (slot.block * sealed.block_stride + pc_block_y() * sealed.head_stride + row * sealed.row_stride + 4 * word);
    const Global<pc_uint8> scales = Global<pc_uint8>(sealed.scales) + (slot.block * sealed.scales_block_stride +
                                                                       pc_block_y() * sealed.scales_head_stride +
                                                                       scales_row * sealed.scales_row_stride + scale);
    return {words.as<pc_uint32>().load(0), load_bits(sealed.scale_type, scales),
            load_bits(sealed.scale_type, scales + sealed.least_stride)};
  }

  PC_MEMBER float number(const SealedBits& loaded, const SealedSlot& slot, int d) const {
    if (!slot.is_sealed) return float_of_bits(type, loaded.bits);
    const int place = (kKeys ? slot.offset : d) % (sealed.bits == 2 ? 16 : 8);
    const pc_uint32 code = loaded.bits >> place * sealed.bits & (sealed.bits == 2 ? 3u : 15u);
    const float scale = float_of_bits(sealed.scale_type, loaded.scale);
    return pc_fma(static_cast<float>(code), scale, float_of_bits(sealed.scale_type, loaded.least));
  }
};

template <int kDim, typename Options>
class GeneralSealedRing : public WarpRing<GeneralSealedRing<kDim, Options>, TileFor<GeneralTile<kDim>, Options>> {
  using Tile = TileFor<GeneralTile<kDim>, Options>;
  using Base = WarpRing<GeneralSealedRing<kDim, Options>, Tile>;

 public:
  static constexpr bool kAllLanesLocate = false;

  PC_MEMBER explicit GeneralSealedRing(const Shared<pc_uint8>& shared) : Base(shared) {}

  PC_MEMBER void start(const PcAttentionParams& p, const WorkRange& work, const GeneralBlock<kDim>& block) {
    this->start_walk(p, work, block.first_row, block.heads);
  }

  PC_MEMBER void locate(const PcAttentionParams& p, const WalkState& /*state*/, int /*stage*/) const {
    const SealedSlot slot = this->slot(p);
    const pc_uint64 place = static_cast<pc_uint64>(slot.offset) << 1 | (slot.is_sealed ? 1 : 0);
    this->store_address(this->slots(), 0, static_cast<pc_address>(slot.block));
    this->store_address(this->slots(), 1, place);
  }

  PC_MEMBER void copy(const PcAttentionParams& p, const WalkState& state, int stage) const {
    const PcSealedAttentionParams& sealed = sealed_params(p);
    read_rows(SealedNumbers<true>{sealed.key, p.key, p.key_type, p.head_dim}, state, this->keys(stage, pc_warp()));
    read_rows(SealedNumbers<false>{sealed.value, p.value, p.value_type, p.value_dim}, state,
              this->values(stage, pc_warp()));
  }

  PC_MEMBER void wait(int /*stage*/, bool /*wanted*/) const { Base::wait(); }

 private:
  PC_MEMBER SealedSlot load_slot(int row) const {
    const pc_uint64 place = this->slots().load(2 * row + 1);
    return {static_cast<int>(this->slots().load(2 * row)), static_cast<int>(place >> 1), (place & 1) != 0};
  }

  // Fills the rows of a tile; elements past the dims, and tokens that the item does not have, become zeros, as do bits
  // of 0.
  template <bool kKeys>
  PC_MEMBER void read_rows(const SealedNumbers<kKeys>& numbers, const WalkState& state,
                           const Shared<pc_uint8>& tile) const {
    constexpr int kAhead = 8;
    const Shared<float> stored = tile.template as<float>();
    PC_NO_UNROLL
    for (int first = pc_lane(); first < Tile::kTokens * kDim; first += 32 * kAhead) {
      SealedBits loaded[kAhead];
      PC_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        const int row = (first + 32 * i) / kDim, d = (first + 32 * i) % kDim;
        loaded[i] = {0, 0, 0};
        const bool exists = d < numbers.dim && state.keys.has(state.token + row);  // fault: sealed_numbers_past_dims
        if (exists) loaded[i] = numbers.load(load_slot(row), d);
      }
      PC_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        const int row = (first + 32 * i) / kDim, d = (first + 32 * i) % kDim;
        stored.store(first + 32 * i, numbers.number(loaded[i], load_slot(row), d));
      }
    }
  }
};

}  // namespace pagecore
