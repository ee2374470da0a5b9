// The tiles of general.cu: the division of rows among warps, the layout of tiles in shared memory, and the copies that
// fill them.
#pragma once

#include "tile_walk.cuh"
#include "tiles.cuh"

namespace pagecore {

template <int kDim>
struct GeneralTile {
  static constexpr PcRingShape kRing = pc_general_ring(kDim);
  static constexpr int kWarps = kRing.warps;
  static constexpr int kStages = kRing.stages;
  static constexpr int kTokens = 8;
  static constexpr int kRows = kRing.warp_rows;
  static constexpr int kQuads = kRows / 4;
  static constexpr int kLanes = kDim < 128 ? kDim / 4 : 32;  // lanes that share a token
  static constexpr int kParts = 32 / kLanes;                 // tokens that a warp reads at a time
  static constexpr int kOwnTokens = kTokens / kParts;        // of a lane
  static constexpr int kVectors = kDim / (4 * kLanes);       // vectors of four dims, of a lane
  static constexpr int kRowBytes = 4 * kDim;
  static constexpr int kPlaneBytes = kTokens * kRowBytes;

  static_assert(kRing.tile_tokens == kTokens && kRing.stage_bytes == 2 * kPlaneBytes,
                "a stage is a tile of keys and one of values");
  static_assert(kRows * kRowBytes <= kRing.stage_bytes && kRows % 4 == 0, "the sums of an item fit in a stage");

  PC_MEMBER static int part() { return pc_lane() / kLanes; }
  // The first of the lane's four dims in vector v.
  PC_MEMBER static int dim(int v) { return 4 * (v * kLanes + pc_lane() % kLanes); }
};

// The division of rows among warps. The warps of a team have the same rows and share the tiles of a round.
struct Teams {
  int warps;  // of a team
  int rows;   // of a team, a multiple of 4

  PC_MEMBER int first_row(int warp) const { return warp / warps * rows; }
};

// The rows of an item that a block processes in one pass: up to kWarps * kRows rows from first_row on.
template <int kDim>
struct GeneralBlock {
  static constexpr int kWarps = GeneralTile<kDim>::kWarps;
  static constexpr int kRows = GeneralTile<kDim>::kRows;

  int heads;
  int first_row;
  bool invariant;  // one warp computes all sums of a row, whatever the number of rows

  PC_MEMBER int rows(const PcWorkItem& item) const {
    return clamp(item.query_count * heads - first_row, 0, kWarps * kRows);
  }
  PC_MEMBER Teams teams(int rows) const {
    if (!invariant && rows <= kRows) return {kWarps, kRows};
    if (!invariant && rows <= 2 * kRows && kWarps == 4) return {2, kRows};
    return {1, min_of(ceil_div(rows, 4 * kWarps) * 4, kRows)};
  }
};

// Keys or values in the cache, of a type and alignment known at run time.
struct GeneralPlane {
  Global<pc_uint8> data;  // of the head
  PcFloat type;
  int dim;
  bool in_vectors;  // every token begins and ends at a multiple of 16 bytes, so that cp.async can copy it

  PC_MEMBER int element() const { return type == PC_FLOAT32 ? 4 : 2; }
};

PC_DEVICE GeneralPlane make_plane(const PcCache& cache, PcFloat type, int dim, int kv_head) {
  GeneralPlane plane;
  plane.type = type;
  plane.dim = dim;
  const int element = plane.element();
  plane.data = Global<pc_uint8>(cache.data) + kv_head * cache.head_stride * element;
  const pc_uint64 strides = cache.block_stride | cache.token_stride | cache.head_stride | dim;
  plane.in_vectors = ((strides * element | cache.data) & 15) == 0;
  return plane;
}

// Starts to copy the rows of a tile; `slots`: addresses of keys and values, alternating. Elements past the dims, and
// tokens that the item does not have, become zeros. Slots are loaded before the first copy, because the compiler moves no
// load of shared memory ahead of a copy.
template <int kDim, typename Element>
PC_DEVICE void copy_rows(const GeneralPlane& plane, const Shared<pc_address>& slots, const Shared<pc_uint8>& target,
                         int which, const WalkState& state) {
  using Tile = GeneralTile<kDim>;
  constexpr int kSize = sizeof(Element), kChunks = kDim * kSize / 16, kCopies = Tile::kTokens * kChunks / 32;
  if (plane.in_vectors) {
    constexpr int kAhead = kCopies < 8 ? kCopies : 8;
    for (int first = pc_lane(); first < 32 * kCopies; first += 32 * kAhead) {
      pc_address slot[kAhead];
      PC_UNROLL
      for (int i = 0; i < kAhead; ++i) slot[i] = slots.load(2 * ((first + 32 * i) / kChunks) + which);
      PC_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        const int row = (first + 32 * i) / kChunks, byte = (first + 32 * i) % kChunks * 16;
        const bool valid = byte < plane.dim * kSize && state.keys.has(state.token + row);
        pc_copy_async(target.address(row * Tile::kRowBytes + byte), Global<pc_uint8>(slot[i]), byte, valid);
      }
    }
    return;
  }
  constexpr int kAhead = 4;
  const Shared<Element> stored = target.template as<Element>();
  for (int first = pc_lane(); first < Tile::kTokens * kDim; first += 32 * kAhead) {
    Element x[kAhead];
    PC_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const int row = (first + 32 * i) / kDim, d = (first + 32 * i) % kDim;
      const bool valid = d < plane.dim && state.keys.has(state.token + row);
      x[i] = valid ? Global<Element>(slots.load(2 * row + which)).load(d) : 0;
    }
    PC_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const int row = (first + 32 * i) / kDim, d = (first + 32 * i) % kDim;
      stored.store(row * (Tile::kRowBytes / kSize) + d, x[i]);
    }
  }
}

// Widens each row to float32 in place.
template <int kDim>
PC_DEVICE void widen_rows(PcFloat type, const Shared<pc_uint8>& plane) {
  using Tile = GeneralTile<kDim>;
  constexpr int kEach = kDim / 32;  // elements of a lane
  for (int row = 0; row < Tile::kTokens; ++row) {
    const Shared<pc_uint32> pairs = (plane + row * Tile::kRowBytes).template as<pc_uint32>();
    pc_uint32 pair[kEach / 2];
    PC_UNROLL
    for (int i = 0; i < kEach / 2; ++i) pair[i] = pairs.load(i * 32 + pc_lane());
    pc_sync_warp();  // fault: general_barrier_before_widening
    PC_UNROLL
    for (int i = 0; i < kEach / 2; ++i) {
      const bool half = type == PC_FLOAT16;
      const pc_uint64 low = pc_float_to_bits(half ? low_of<pc_half>(pair[i]) : low_of<pc_bfloat16>(pair[i]));
      const pc_uint64 high = pc_float_to_bits(half ? high_of<pc_half>(pair[i]) : high_of<pc_bfloat16>(pair[i]));
      pairs.template as<pc_uint64>().store(i * 32 + pc_lane(), low | high << 32);
    }
  }
  pc_sync_warp();
}

// A warp's ring of tiles, and the walk that fills it.
template <int kDim>
class GeneralRing {
  using Tile = GeneralTile<kDim>;

 public:
  PC_MEMBER GeneralRing(const PcAttentionParams& p, const Shared<pc_uint8>& shared, const Heads& heads)
      : key_(make_plane(p.key, p.key_type, p.head_dim, heads.kv)),
        value_(make_plane(p.value, p.value_type, p.value_dim, heads.kv)),
        rings_(shared),
        slots_((shared + (Tile::kRing.slots_begin() + pc_warp() * Tile::kRing.slot_bytes())).template as<pc_address>()),
        walk_(shared + (Tile::kRing.walks_begin() + pc_warp() * PcRingShape::kWalkBytes)) {}

  PC_MEMBER void start(const PcAttentionParams& p, const WorkRange& work, const GeneralBlock<kDim>& block) {
    walk_.start(p, work, block.first_row, block.heads);
  }

  // Starts to fill a stage with the next tile, after a barrier of the warp. Commits exactly one group of copies, which
  // is empty if the warp has no keys in the round.
  PC_MEMBER void fill(const PcAttentionParams& p, int stage) {
    const WalkState state = walk_.state();
    const bool empty = state.rounds == 0 || !state.keys.overlaps(state.token, Tile::kTokens);
    if (!empty && pc_lane() < Tile::kTokens) {
      const Slot slot = walk_.slot(p);
      slots_.store(2 * pc_lane(), (key_.data + slot_offset(p.key, slot) * key_.element()).address());
      slots_.store(2 * pc_lane() + 1, (value_.data + slot_offset(p.value, slot) * value_.element()).address());
    }
    pc_sync_warp();
    if (!empty) copy(key_, keys(stage, pc_warp()), 0, state);
    if (!empty) copy(value_, values(stage, pc_warp()), 1, state);
    pc_commit_copies();
    if (state.rounds != 0) walk_.advance(p, state);
  }

  PC_MEMBER Shared<pc_uint8> keys(int stage, int warp) const {
    return rings_ + (warp * Tile::kRing.ring_bytes() + stage * Tile::kRing.stage_bytes);
  }
  PC_MEMBER Shared<pc_uint8> values(int stage, int warp) const { return keys(stage, warp) + Tile::kPlaneBytes; }

  // Waits for the warp's own tile of the oldest round, and widens it to float32 if it is wanted.
  PC_MEMBER void wait(int stage, bool wanted) const {
    pc_wait_copies<Tile::kStages - 1>();
    pc_sync_warp();
    if (wanted && key_.type != PC_FLOAT32) widen_rows<kDim>(key_.type, keys(stage, pc_warp()));
    if (wanted && value_.type != PC_FLOAT32) widen_rows<kDim>(value_.type, values(stage, pc_warp()));
  }

 private:
  PC_MEMBER void copy(const GeneralPlane& plane, const Shared<pc_uint8>& target, int which,
                      const WalkState& state) const {
    if (plane.type == PC_FLOAT32) {
      copy_rows<kDim, pc_uint32>(plane, slots_, target, which, state);
    } else {
      copy_rows<kDim, pc_uint16>(plane, slots_, target, which, state);
    }
  }

  GeneralPlane key_, value_;
  Shared<pc_uint8> rings_;  // of all warps
  Shared<pc_address> slots_;
  TileWalk<Tile::kTokens, Tile::kWarps> walk_;
};

}  // namespace pagecore
