// The tiles of latent.cu: the copies of rows of the cache into a ring, and the unpacking of codes to 16-bit tiles.
//
//   ring    [stages][16 rows of the cache]     warp w copies, and unpacks, rows kOwn * w .. kOwn * w + kOwn - 1
//             | plain rows are multiplied here
//             | codes are unpacked, 8 numbers of a lane at a time
//             v
//   tiles   [2][16, latent_dim + 64] of T
//
// Chunk c of row r of a tile, 16 bytes, is stored at c ^ (r % 8), as in TileRow.
#pragma once

#include "cuda_src/abi/latent.h"
#include "cuda_src/attention/tiles/tile_walk.cuh"
#include "cuda_src/attention/tiles/tiles.cuh"
#include "cuda_src/device/formats.cuh"
#include "cuda_src/device/units.cuh"
#include "cuda_src/shapes/latent.h"

namespace pagecore {

struct LatentPlain {
  static constexpr PcLatentFormat kFormat = PC_LATENT_PLAIN;
};
struct LatentE4M3 {
  static constexpr PcLatentFormat kFormat = PC_LATENT_E4M3;
};
struct LatentFp8 {
  static constexpr PcLatentFormat kFormat = PC_LATENT_FP8_DS;
};
struct LatentNvfp4 {
  static constexpr PcLatentFormat kFormat = PC_LATENT_NVFP4_DS;
};

// T: type of the elements that are multiplied. kDim: latent dim. kRowCount: packed rows of an item, 16 or 32.
template <typename T, int kDim, int kRowCount, typename Format>
struct LatentTile {
  using Element = T;
  static constexpr PcLatentFormat kFormat = Format::kFormat;
  static constexpr PcLatentShape kShape = {kFormat, kDim, kRowCount};
  static constexpr int kLatent = kDim;
  static constexpr int kRows = kRowCount;
  static constexpr int kTokens = PcLatentShape::kTokens;
  static constexpr int kParts = PcLatentShape::kParts;
  static constexpr int kStages = PcLatentShape::kStages;
  static constexpr int kWarps = kShape.warps();
  static constexpr int kGroups = kShape.groups();
  static constexpr int kOwn = kTokens / kWarps;  // rows of a tile that a warp copies
  static constexpr int kLatentChunks = kDim / 8;
  static constexpr int kChunks = kLatentChunks + 8;  // of a 16-bit row
  static constexpr int kRowBytes = kChunks * 16;
  static constexpr int kStoredBytes = pc_latent_row_bytes(kFormat, kDim);
  static constexpr int kSteps = kDim / 64 + 1;   // matrix instructions of a warp over the dims of 16 keys
  static constexpr int kValueSteps = kDim / 64;  // pairs of fragments of O of a warp: 16 dims of every 64
  static constexpr bool kUnpacks = kFormat != PC_LATENT_PLAIN;

  static_assert(kDim % 64 == 0, "the four warps of a group share every 64 dims");
  static_assert(kStoredBytes % 16 == 0, "rows of a stage begin at multiples of 16 bytes");

  PC_MEMBER static int at(int row, int chunk) { return row * kRowBytes + ((chunk ^ (row & 7)) << 4); }
  // A warp computes with the 16 dims of every 64 that its part selects.
  PC_MEMBER static int part() { return pc_warp() % kParts; }
  PC_MEMBER static int group() { return pc_warp() / kParts; }
};

// Two e4m3 codes, in the lowest bits of `codes`, times `scale`.
template <typename T>
PC_DEVICE pc_uint32 scaled_e4m3(pc_uint32 codes, float scale) {
  const pc_uint32 halves = halves_of_e4m3(codes);
  return pc_pack<T>(low_half(halves) * scale, high_half(halves) * scale);
}

// Two numbers in halves as elements of T, which holds them.
template <typename T>
PC_DEVICE pc_uint32 from_halves(pc_uint32 halves) {
  if constexpr (IsSame<T, pc_half>::kValue) {
    return halves;
  } else {
    return pc_pack<T>(low_half(halves), high_half(halves));
  }
}

// Returns 8 numbers, chunk `chunk` of a stored row.
template <typename Tile>
PC_DEVICE pc_vector unpack_latent(const Shared<pc_uint8>& row, int chunk) {
  using T = typename Tile::Element;
  const bool is_rope = chunk >= Tile::kLatentChunks;
  const int rope = chunk - Tile::kLatentChunks;
  pc_vector v;
  if constexpr (Tile::kFormat == PC_LATENT_FP8_DS) {
    if (is_rope) return row.load_vector(PC_FP8_ROPE + 16 * rope);
    const pc_uint64 codes = row.template as<pc_uint64>().load(chunk);
    const float scale = row.template as<float>().load(PC_FP8_SCALES / 4 + chunk / 16);
    PC_UNROLL
    for (int k = 0; k < 4; ++k) v.word[k] = scaled_e4m3<T>(static_cast<pc_uint32>(codes >> 16 * k), scale);
    return v;
  } else if constexpr (Tile::kFormat == PC_LATENT_NVFP4_DS) {
    if (!is_rope) {
      const pc_uint32 codes = row.template as<pc_uint32>().load(chunk);
      const int group = chunk / 2;
      const pc_uint32 byte = row.load(PC_NVFP4_SCALES + 8 * (group % 4) + group / 4);
      const pc_uint32 scale = halves_of_e4m3(byte * 0x0101u);
      PC_UNROLL
      for (int k = 0; k < 4; ++k) {
        v.word[k] = from_halves<T>(pc_fma_halves(halves_of_e2m1(codes >> 8 * k), scale, 0x80008000u));
      }
      return v;
    }
  }
  const int at = Tile::kFormat == PC_LATENT_E4M3 ? chunk : PC_NVFP4_ROPE / 8 + rope;
  const pc_uint64 codes = row.template as<pc_uint64>().load(at);
  PC_UNROLL
  for (int k = 0; k < 4; ++k) v.word[k] = from_halves<T>(halves_of_e4m3(static_cast<pc_uint32>(codes >> 16 * k)));
  return v;
}

// The ring of a CTA. Every warp walks all tiles, and copies its own rows of each.
template <typename Tile>
class LatentRing {
  static constexpr PcLatentShape kShape = Tile::kShape;

 public:
  PC_MEMBER LatentRing(const PcLatentParams& params, const Shared<pc_uint8>& shared, const WorkRange& work,
                       int first_row)
      : params_(params),
        shared_(shared),
        walk_(shared + (kShape.walks_begin() + pc_warp() * PcRingShape::kWalkBytes)),
        num_filled_(0) {
    walk_.start(params.attention, work, first_row, params.attention.num_query_heads);
  }

  // Starts to fill a stage with the next tile, after a barrier of the block. Commits exactly one group of copies.
  PC_MEMBER void fill(int stage) {
    const PcAttentionParams& p = params_.attention;
    const WalkState state = walk_.state();
    if (state.rounds != 0 && pc_lane() < Tile::kOwn) {
      Slot slot = walk_.slot(p);
      if (params_.sparse != 0) {
        listed(stage).store(pc_warp() * Tile::kOwn + pc_lane(), static_cast<pc_uint8>(walk_.is_listed() ? 1 : 0));
        const int block = divide(slot.block, params_.block);
        slot = {block, slot.block - block * params_.block.divisor};
      }
      const bool skipped = params_.sparse != 0 && !walk_.is_listed();
      const Global<pc_uint8> latent(p.key.data), rope(p.value.data);
      slots().store(2 * pc_lane(), skipped ? 0 : (latent + slot_offset(p.key, slot)).address());
      slots().store(2 * pc_lane() + 1, (rope + slot_offset(p.value, slot)).address());
    }
    pc_sync_warp();  // fault: latent_barrier_before_copies
    if (state.rounds != 0) {
      copy(stage, state);
      ++num_filled_;
    }
    pc_commit_copies();
    if (state.rounds != 0) walk_.advance(p, state);
  }

  // Waits for the warp's rows of the tile of a round, and unpacks codes. A barrier of the block must follow.
  PC_MEMBER void prepare(unsigned round) const {
    pc_wait_copies<Tile::kStages - 2>();  // fault: latent_wait
    if constexpr (Tile::kUnpacks) {
      if (round >= num_filled_) return;
      pc_sync_warp();  // fault: latent_barrier_before_unpacking
      const Shared<pc_uint8> from = shared_ + round % Tile::kStages * kShape.stage_bytes(), to = tile(round);
      PC_NO_UNROLL
      for (int at = pc_lane(); at < Tile::kOwn * Tile::kChunks; at += 32) {
        const int row = pc_warp() * Tile::kOwn + at / Tile::kChunks, chunk = at % Tile::kChunks;
        to.store_vector(Tile::at(row, chunk), unpack_latent<Tile>(from + row * Tile::kStoredBytes, chunk));
      }
    }
  }

  // The 16-bit rows of a round.
  PC_MEMBER Shared<pc_uint8> tile(unsigned round) const {
    if constexpr (Tile::kUnpacks) return shared_ + (kShape.tiles_begin() + round % 2 * kShape.tile_bytes());
    return shared_ + round % Tile::kStages * kShape.stage_bytes();
  }
  // One byte for each token of a round: 0 if a list skips it.
  PC_MEMBER Shared<pc_uint8> listed(unsigned round) const {
    return shared_ + (kShape.listed_begin() + round % Tile::kStages * Tile::kTokens);
  }

 private:
  // Rows of tokens that the item does not have become zeros, also in codes.
  PC_MEMBER void copy(int stage, const WalkState& state) const {
    const Shared<pc_uint8> target = shared_ + stage * kShape.stage_bytes();
    PC_UNROLL
    for (int r = 0; r < Tile::kOwn; ++r) {
      const pc_address latent = slots().load(2 * r);
      const bool valid = latent != 0 && state.keys.has(state.token + r);
      const int row = pc_warp() * Tile::kOwn + r;
      constexpr int kRowChunks = Tile::kFormat == PC_LATENT_PLAIN  ? Tile::kLatentChunks
                                 : Tile::kFormat == PC_LATENT_E4M3 ? Tile::kLatent / 16
                                                                   : Tile::kStoredBytes / 16;
      PC_UNROLL
      for (int first = 0; first < kRowChunks; first += 32) {
        const int chunk = first + pc_lane();
        if (chunk >= kRowChunks) break;
        const int to = Tile::kUnpacks ? row * Tile::kStoredBytes + chunk * 16 : Tile::at(row, chunk);
        pc_copy_async(target.address(to), Global<pc_uint8>(latent), chunk * 16, valid);
      }
    }
    if constexpr (Tile::kFormat == PC_LATENT_PLAIN || Tile::kFormat == PC_LATENT_E4M3) copy_rope(target, state);
  }

  // A lane copies one chunk of rope.
  PC_MEMBER void copy_rope(const Shared<pc_uint8>& target, const WalkState& state) const {
    constexpr int kRopeChunks = Tile::kUnpacks ? 4 : 8;
    const int r = pc_lane() / kRopeChunks, chunk = pc_lane() % kRopeChunks;
    if (r >= Tile::kOwn) return;
    const bool valid = slots().load(2 * r) != 0 && state.keys.has(state.token + r);
    const int row = pc_warp() * Tile::kOwn + r;
    const int to = Tile::kUnpacks ? row * Tile::kStoredBytes + Tile::kLatent + chunk * 16
                                  : Tile::at(row, Tile::kLatentChunks + chunk);
    pc_copy_async(target.address(to), Global<pc_uint8>(slots().load(2 * r + 1)), chunk * 16, valid);
  }

  // Addresses of the latents and of the ropes of the warp's rows, alternating; a latent of 0 is skipped.
  PC_MEMBER Shared<pc_address> slots() const {
    return (shared_ + (kShape.slots_begin() + pc_warp() * Tile::kOwn * PcRingShape::kSlotBytes))
        .template as<pc_address>();
  }

  const PcLatentParams& params_;
  Shared<pc_uint8> shared_;
  TileWalk<Tile::kOwn, Tile::kWarps, Latent> walk_;
  unsigned num_filled_;  // tiles
};

}  // namespace pagecore

// The manifest names instances by these.
using pagecore::LatentE4M3;
using pagecore::LatentFp8;
using pagecore::LatentNvfp4;
using pagecore::LatentPlain;
