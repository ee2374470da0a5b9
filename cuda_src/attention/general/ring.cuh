// The tiles of general.cu: the division of rows among warps, the layout of tiles in shared memory, and the copies that
// fill them.
#pragma once

#include "cuda_src/attention/tiles/warp_ring.cuh"

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
  static constexpr int kValuesBegin = kTokens * kRowBytes;  // of a stage

  static_assert(kRing.tile_tokens == kTokens && kRing.stage_bytes == 2 * kValuesBegin,
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

PC_DEVICE int width_of(PcFloat type) { return type == PC_FLOAT32 ? 4 : 2; }

// Rows of a head in the cache: of elements, or of the codes of a stored format.
struct RowSource {
  Global<pc_uint8> data;
  int count;  // elements of a row
  int unit;   // bytes of a cp.async: 16 or 4 if every row begins and ends at a multiple; 0 if rows allow neither
};

// Strides of `cache`, and the length of its rows, count `unit` bytes.
PC_DEVICE RowSource row_source(const PcCache& cache, int unit, int length, int count, int kv_head) {
  const pc_uint64 strides = cache.block_stride | cache.token_stride | cache.head_stride | length;
  const pc_uint64 bits = strides * unit | cache.data;
  return {Global<pc_uint8>(cache.data) + kv_head * cache.head_stride * unit, count,
          (bits & 15) == 0  ? 16
          : (bits & 3) == 0 ? 4
                            : 0};
}

// copy_elements in units of kUnit bytes. Slots are loaded before the first copy, because the compiler moves no load of
// shared memory ahead of a copy.
template <int kDim, int kSize, int kUnit>
PC_DEVICE void copy_units(const RowSource& source, const Shared<pc_address>& slots, const Shared<pc_uint8>& target,
                          int which, const WalkState& state) {
  using Tile = GeneralTile<kDim>;
  constexpr int kUnits = kDim * kSize / kUnit, kCopies = Tile::kTokens * kUnits / 32;
  constexpr int kAhead = kCopies < 8 ? kCopies : 8;
  PC_NO_UNROLL
  for (int first = pc_lane(); first < 32 * kCopies; first += 32 * kAhead) {
    pc_address slot[kAhead];
    PC_UNROLL
    for (int i = 0; i < kAhead; ++i) slot[i] = slots.load(2 * ((first + 32 * i) / kUnits) + which);
    PC_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const int row = (first + 32 * i) / kUnits, byte = (first + 32 * i) % kUnits * kUnit;
      const bool valid = byte < source.count * kSize && state.keys.has(state.token + row);  // fault: units_past_dims
      const SharedAddress to = target.address(row * Tile::kRowBytes + byte);
      if constexpr (kUnit == 16) {
        pc_copy_async(to, Global<pc_uint8>(slot[i]), byte, valid);
      } else {
        pc_copy_word_async(to, Global<pc_uint8>(slot[i]), byte, valid);
      }
    }
  }
}

// Starts to copy the rows of a tile; `slots`: addresses of keys and values, alternating. Elements past the dims, and
// tokens that the item does not have, become zeros. The threads wait for rows that cp.async cannot copy.
template <int kDim, typename Element>
PC_DEVICE void copy_elements(const RowSource& source, const Shared<pc_address>& slots, const Shared<pc_uint8>& target,
                             int which, const WalkState& state) {
  using Tile = GeneralTile<kDim>;
  constexpr int kSize = sizeof(Element), kAhead = 4;
  if (source.unit == 16) return copy_units<kDim, kSize, 16>(source, slots, target, which, state);
  if (source.unit == 4) return copy_units<kDim, kSize, 4>(source, slots, target, which, state);
  const Shared<Element> stored = target.template as<Element>();
  for (int first = pc_lane(); first < Tile::kTokens * kDim; first += 32 * kAhead) {
    Element x[kAhead];
    PC_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const int row = (first + 32 * i) / kDim, d = (first + 32 * i) % kDim;
      const bool valid = d < source.count && state.keys.has(state.token + row);
      x[i] = valid ? Global<Element>(slots.load(2 * row + which)).load(d) : 0;
    }
    PC_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const int row = (first + 32 * i) / kDim, d = (first + 32 * i) % kDim;
      stored.store(row * (Tile::kRowBytes / kSize) + d, x[i]);
    }
  }
}

// copy_elements for rows of floats.
template <int kDim>
PC_DEVICE void copy_floats(PcFloat type, const RowSource& source, const Shared<pc_address>& slots,
                           const Shared<pc_uint8>& target, int which, const WalkState& state) {
  if (type == PC_FLOAT32) {
    copy_elements<kDim, pc_uint32>(source, slots, target, which, state);
  } else {
    copy_elements<kDim, pc_uint16>(source, slots, target, which, state);
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

// Keys or values of a cache of float32, float16 or bfloat16.
template <int kDim>
class PlainPlane {
  using Tile = GeneralTile<kDim>;

 public:
  static constexpr bool kHasScales = false;

  PC_MEMBER PlainPlane(const PcCache& cache, PcFloat type, int dim, int kv_head)
      : cache_(cache), type_(type), rows_(row_source(cache, width_of(type), dim, dim, kv_head)) {}

  PC_MEMBER pc_address address(const Slot& slot) const {
    return (rows_.data + slot_offset(cache_, slot) * width_of(type_)).address();
  }

  PC_MEMBER void load_scales(const Shared<pc_uint8>& /*tile*/, const Slot& /*slot*/, const WalkState& /*state*/) const {
  }

  PC_MEMBER void copy(const Shared<pc_address>& slots, const Shared<pc_uint8>& tile, int which,
                      const WalkState& state) const {
    copy_floats<kDim>(type_, rows_, slots, tile, which, state);
  }

  PC_MEMBER void widen(const Shared<pc_uint8>& tile) const {
    if (type_ != PC_FLOAT32) widen_rows<kDim>(type_, tile);
  }

 private:
  const PcCache& cache_;
  PcFloat type_;
  RowSource rows_;
};

// A warp's ring of tiles, and the walk that fills it. `Plane` is PlainPlane or StoredPlane (stored.cuh):
//
//   address(slot)                       of the row of a token
//   load_scales(tile, slot, state)      copy the scales of the rows of a tile, if there are any
//   copy(slots, tile, which, state)     start to copy the rows of a tile; `which`: 0 for keys, 1 for values
//   widen(tile)                         replace the rows of a tile by float32
template <int kDim, typename Plane, typename Options>
class GeneralRing : public WarpRing<GeneralRing<kDim, Plane, Options>, TileFor<GeneralTile<kDim>, Options>> {
  using Tile = TileFor<GeneralTile<kDim>, Options>;
  using Base = WarpRing<GeneralRing<kDim, Plane, Options>, Tile>;

 public:
  static constexpr bool kAllLanesLocate = Plane::kHasScales;

  PC_MEMBER GeneralRing(const Shared<pc_uint8>& shared, const Plane& key, const Plane& value)
      : Base(shared), key_(key), value_(value) {}

  PC_MEMBER void start(const PcAttentionParams& p, const WorkRange& work, const GeneralBlock<kDim>& block) {
    this->start_walk(p, work, block.first_row, block.heads);
  }

  PC_MEMBER void locate(const PcAttentionParams& p, const WalkState& state, int stage) const {
    const Slot slot = this->slot(p);
    if (pc_lane() < Tile::kTokens) {
      this->store_address(this->slots(), 0, key_.address(slot));
      this->store_address(this->slots(), 1, value_.address(slot));
    }
    key_.load_scales(this->keys(stage, pc_warp()), slot, state);
    value_.load_scales(this->values(stage, pc_warp()), slot, state);
  }

  PC_MEMBER void copy(const PcAttentionParams& /*p*/, const WalkState& state, int stage) const {
    key_.copy(this->slots(), this->keys(stage, pc_warp()), 0, state);
    value_.copy(this->slots(), this->values(stage, pc_warp()), 1, state);
  }

  // Waits for the warp's own tile of the oldest round, and widens it to float32 if it is wanted.
  PC_MEMBER void wait(int stage, bool wanted) const {
    Base::wait();
    if (wanted) key_.widen(this->keys(stage, pc_warp()));
    if (wanted) value_.widen(this->values(stage, pc_warp()));
  }

 private:
  Plane key_, value_;
};

}  // namespace pagecore
