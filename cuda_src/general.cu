// Attention in float32, by fused multiply-adds: float32 caches, and whatever the matrix kernels do not serve. Query,
// key and value may be of different types, dims and alignments; head_dim and value_dim are at most kDim.
//
// A CTA is one worker of the schedule for one key head, or a chunk of its query heads. Items have any number of packed
// rows, query * heads + head; where they are more than the block holds, the worker goes through its items again for the
// next ones.
//
//                 kDim, four dims a lane (twice, four times that from 256 on)
//               +--------------------------------------------+
//   rows of a   |  Q: shared memory   O: registers           |   16, from kDim 128 on 8, 4 at 512
//   warp        +--------------------------------------------+
//   8 tokens    |  K, V: shared memory, a lane reads its dims |
//               +--------------------------------------------+
//
// A lane multiplies its dims of 4 rows and 8 tokens; the 32 sums of lanes are then exchanged so that each lane ends
// with one score, whose softmax costs one instruction for all. Weights go around through shared memory. Up to kDim 64,
// half a warp has all dims, and each half has every other token.
//
// Every warp has a ring of its own and fills it as in decode.cu: 64 KiB in flight for a CTA. Where an item has no more
// rows than a warp, each warp works on its own tiles; with more, rows are divided too, and a warp works on the tiles of
// others: on all of them where each warp has rows of its own, as it always is in batch-invariant calls. Rows that
// cannot be copied by 16 bytes are loaded element by element when a stage is filled. 16-bit elements become float32
// where they lie, before their use.
//
// Bytes: keys and values once for each block of rows; queries once a split; partial rows once written and once read.

#include "abi_plan.h"
#include "splits.cuh"
#include "tile_walk.cuh"
#include "values.cuh"

namespace pagecore {

template <int kDim>
struct GeneralTile {
  static constexpr PcRingShape kRing = pc_general_ring(kDim);
  static constexpr int kWarps = kRing.warps;
  static constexpr int kStages = kRing.stages;
  static constexpr int kTokens = 8;
  static constexpr int kRows = kRing.warp_rows;
  static constexpr int kQuads = kRows / 4;
  static constexpr int kLanes = kDim < 128 ? kDim / 4 : 32;  // that share a token
  static constexpr int kParts = 32 / kLanes;                 // tokens that a warp reads at a time
  static constexpr int kOwnTokens = kTokens / kParts;        // of a lane
  static constexpr int kVectors = kDim / (4 * kLanes);       // of four dims, in a lane
  static constexpr int kRowBytes = 4 * kDim;
  static constexpr int kPlaneBytes = kTokens * kRowBytes;

  static_assert(kRing.tile_tokens == kTokens && kRing.stage_bytes == 2 * kPlaneBytes, "");
  static_assert(kRows * kRowBytes <= kRing.stage_bytes && kRows % 4 == 0, "the sums of an item lie in a stage");

  PC_MEMBER static int next(int stage) { return stage == kStages - 1 ? 0 : stage + 1; }
  PC_MEMBER static int part() { return pc_lane() / kLanes; }
  // The first of a lane's dims in vector v.
  PC_MEMBER static int dim(int v) { return 4 * (v * kLanes + pc_lane() % kLanes); }
};

// How rows are divided among warps: those of a team have the same rows, and share the tiles of a round.
struct Teams {
  int warps;  // of a team
  int rows;   // of a team, a multiple of 4

  PC_MEMBER int first_row(int warp) const { return warp / warps * rows; }
};

// How a block works on an item: on rows first_row, first_row + 1 ... of it.
template <int kDim>
struct GeneralBlock {
  static constexpr int kWarps = GeneralTile<kDim>::kWarps;
  static constexpr int kRows = GeneralTile<kDim>::kRows;

  int heads;
  int first_row;
  bool invariant;  // a row's sums are of one warp, however many rows there are

  PC_MEMBER int rows(const PcWorkItem& item) const {
    return clamp(item.query_count * heads - first_row, 0, kWarps * kRows);
  }
  PC_MEMBER Teams teams(int rows) const {
    if (!invariant && rows <= kRows) return {kWarps, kRows};
    if (!invariant && rows <= 2 * kRows && kWarps == 4) return {2, kRows};
    return {1, min_of(divide_up(rows, 4 * kWarps) * 4, kRows)};
  }
};

// A plane of keys or values as it comes.
struct GeneralPlane {
  Global<pc_uint8> data;  // of the head
  PcFloat type;
  int dim;
  bool in_vectors;  // every token begins and ends at a multiple of 16 bytes

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

  // Begins to fill a stage with the next tile, behind a barrier of the warp; always one group of copies.
  PC_MEMBER void fill(const PcAttentionParams& p, int stage) {
    const WalkState state = walk_.state();
    const bool empty = state.rounds == 0 || !state.keys.meets(state.token, Tile::kTokens);
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

  // Until the warp's own part of the oldest round is there, in float32 if it is wanted.
  PC_MEMBER void wait(int stage, bool wanted) const {
    pc_wait_copies<Tile::kStages - 1>();
    pc_sync_warp();
    if (wanted && key_.type != PC_FLOAT32) widen(key_.type, keys(stage, pc_warp()));
    if (wanted && value_.type != PC_FLOAT32) widen(value_.type, values(stage, pc_warp()));
  }

 private:
  PC_MEMBER void copy(const GeneralPlane& plane, const Shared<pc_uint8>& target, int which,
                      const WalkState& state) const {
    if (plane.type == PC_FLOAT32) {
      copy_of<pc_uint32>(plane, target, which, state);
    } else {
      copy_of<pc_uint16>(plane, target, which, state);
    }
  }

  // Zeros stand behind the dims, and for tokens that the item does not have. Slots are read before any copy begins:
  // behind one, no read of shared memory is moved forward.
  template <typename Element>
  PC_MEMBER void copy_of(const GeneralPlane& plane, const Shared<pc_uint8>& target, int which,
                         const WalkState& state) const {
    constexpr int kSize = sizeof(Element), kChunks = kDim * kSize / 16, kCopies = Tile::kTokens * kChunks / 32;
    if (plane.in_vectors) {
      constexpr int kAhead = kCopies < 8 ? kCopies : 8;
      for (int first = pc_lane(); first < 32 * kCopies; first += 32 * kAhead) {
        pc_address slot[kAhead];
        PC_UNROLL
        for (int i = 0; i < kAhead; ++i) slot[i] = slots_.load(2 * ((first + 32 * i) / kChunks) + which);
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
        x[i] = valid ? Global<Element>(slots_.load(2 * row + which)).load(d) : 0;
      }
      PC_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        const int row = (first + 32 * i) / kDim, d = (first + 32 * i) % kDim;
        stored.store(row * (Tile::kRowBytes / kSize) + d, x[i]);
      }
    }
  }

  // Each row becomes float32 where it lies.
  PC_MEMBER static void widen(PcFloat type, const Shared<pc_uint8>& plane) {
    constexpr int kEach = kDim / 32;  // elements of a lane
    for (int row = 0; row < Tile::kTokens; ++row) {
      const Shared<pc_uint32> pairs = (plane + row * Tile::kRowBytes).template as<pc_uint32>();
      pc_uint32 pair[kEach / 2];
      PC_UNROLL
      for (int i = 0; i < kEach / 2; ++i) pair[i] = pairs.load(i * 32 + pc_lane());
      pc_sync_warp();
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

  GeneralPlane key_, value_;
  Shared<pc_uint8> rings_;  // of all warps
  Shared<pc_address> slots_;
  TileWalk<Tile::kTokens, Tile::kWarps> walk_;
};

// Sums of lanes are exchanged: of kCount numbers, lane l ends with the sum of number l % kCount over kCount lanes. In
// each step a lane keeps half of its numbers and gives the other half away.
template <int kCount, int kTotal>
PC_DEVICE float exchange_sums(float (&x)[kTotal]) {
  if constexpr (kCount == 1) {
    return x[0];
  } else {
    constexpr int kHalf = kCount / 2;
    const bool upper = (pc_lane() & kHalf) != 0;
    PC_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      const float given = upper ? x[i] : x[i + kHalf], kept = upper ? x[i + kHalf] : x[i];
      x[i] = kept + pc_shuffle_xor(given, kHalf);
    }
    return exchange_sums<kHalf>(x);
  }
}

// What a warp has of an item: its rows, and their sums over the tiles that it worked on.
template <int kDim, typename Options>
class GeneralRows {
  using Tile = GeneralTile<kDim>;

 public:
  PC_MEMBER explicit GeneralRows(const Shared<pc_uint8>& shared)
      : score_rows_((shared + Tile::kRing.score_rows_begin()).template as<ScoreRow>()),
        queries_((shared + Tile::kRing.queries_begin()).template as<float>()),
        weights_((shared + (Tile::kRing.weights_begin() + pc_warp() * Tile::kRing.weight_bytes)).template as<float>()) {
  }

  // The block's queries and what they attend to go to shared memory; a barrier is to follow.
  PC_MEMBER void start(const PcAttentionParams& p, const Heads& heads, const Sequence& sequence, const PcWorkItem& item,
                       const GeneralBlock<kDim>& block, bool negate) {
    const int rows = block.rows(item), whole_quads = divide_up(rows, 4) * 4;
    for (int at = pc_thread(); at < whole_quads * kDim; at += pc_num_threads()) {
      const int row = at / kDim, d = at % kDim, packed = block.first_row + row;
      const int query_row = item.query_begin + packed / heads.count, head = heads.first + packed % heads.count;
      float x = 0.0f;
      if (row < rows && d < p.head_dim) {
        x = load_float(p.query_type, p.query.data, row_offset(p.query, query_row, head) + d);
      }
      queries_.store(at, negate ? -x : x);
    }
    for (int row = pc_thread(); row < rows; row += pc_num_threads()) {
      const int packed = block.first_row + row;
      score_rows_.store(row, load_score_row<Options>(p, sequence, item, item.query_begin + packed / heads.count,
                                                     heads.first + packed % heads.count, true));
    }
    common_ = common_keys(p, sequence, item);
    const Teams teams = block.teams(rows);
    sharers_ = teams.warps;
    first_row_ = teams.first_row(pc_warp());
    num_rows_ = clamp(rows - first_row_, 0, teams.rows);
    clear();
  }

  PC_MEMBER void clear() {
    PC_UNROLL
    for (int quad = 0; quad < Tile::kQuads; ++quad) {
      top_[quad] = -pc_infinity();
      sum_[quad] = 0.0f;
    }
    PC_UNROLL
    for (int r = 0; r < Tile::kRows; ++r) {
      PC_UNROLL
      for (int i = 0; i < 4 * Tile::kVectors; ++i) o_[r][i] = 0.0f;
    }
  }

  PC_MEMBER bool has_rows() const { return num_rows_ > 0; }
  PC_MEMBER int sharers() const { return sharers_; }

  // One tile, keys `token` .. token + 7; weights are left for add_values.
  PC_MEMBER void add_keys(const PcAttentionParams& p, const ScoreRule& rule, const Shared<pc_uint8>& keys, int token) {
    const bool edge = token < common_.begin || token + Tile::kTokens > common_.end;
    PC_UNROLL
    for (int quad = 0; quad < Tile::kQuads; ++quad) {
      if (4 * quad < num_rows_) add_keys_to(quad, p, rule, keys, token, edge);
    }
    pc_sync_warp();
  }

  // A weight below 0 stands for a key that the row does not attend to: its value may be anything.
  PC_MEMBER void add_values(const Shared<pc_uint8>& values) {
    for (int t = 0; t < Tile::kOwnTokens; ++t) {
      const int token = t * Tile::kParts + Tile::part();
      float v[Tile::kVectors][4];
      PC_UNROLL
      for (int i = 0; i < Tile::kVectors; ++i) {
        load_floats(values.template as<float>(), token * kDim + Tile::dim(i), v[i]);
      }
      PC_UNROLL
      for (int quad = 0; quad < Tile::kQuads; ++quad) {
        if (4 * quad >= num_rows_) break;
        const pc_vector weights = weights_.load_vector(quad * 32 + token * 4);
        PC_UNROLL
        for (int r = 0; r < 4; ++r) {
          const float weight = pc_bits_to_float(weights.word[r]);
          if (weight < 0.0f) continue;
          PC_UNROLL
          for (int i = 0; i < 4 * Tile::kVectors; ++i) {
            o_[4 * quad + r][i] = pc_fma(weight, v[i / 4][i % 4], o_[4 * quad + r][i]);
          }
        }
      }
    }
    pc_sync_warp();
  }

  // The warp's sums of rows, to be joined with those of the warps that share them: largest scores (factor included) and
  // sums, and O as [rows, kDim].
  PC_MEMBER void store(const Shared<float>& sums, const Shared<float>& o, float factor) {
    PC_UNROLL
    for (int quad = 0; quad < Tile::kQuads; ++quad) {
      if (4 * quad >= num_rows_) break;
      const float sum = over_tokens<false>(sum_[quad]);
      if (token_of_lane() == 0) {
        sums.store(2 * (4 * quad + row_of_lane()), top_[quad] * factor);
        sums.store(2 * (4 * quad + row_of_lane()) + 1, sum);
      }
      PC_UNROLL
      for (int r = 4 * quad; r < 4 * quad + 4; ++r) {
        PC_UNROLL
        for (int v = 0; v < Tile::kVectors; ++v) {
          pc_vector four;
          PC_UNROLL
          for (int i = 0; i < 4; ++i) {
            float x = o_[r][4 * v + i];
            if (Tile::kParts == 2) x += pc_shuffle_xor(x, 16);
            four.word[i] = pc_float_to_bits(x);
          }
          if (Tile::part() == 0) o.store_vector(r * kDim + Tile::dim(v), four);
        }
      }
    }
  }

 private:
  // Which of a quad's scores a lane has once their sums are exchanged.
  PC_MEMBER static int row_of_lane() { return pc_lane() % Tile::kLanes / Tile::kOwnTokens; }
  PC_MEMBER static int token_of_lane() { return pc_lane() % Tile::kOwnTokens * Tile::kParts + Tile::part(); }

  // The sum or the largest of a row's 8 tokens.
  template <bool kLargest>
  PC_MEMBER static float over_tokens(float x) {
    PC_UNROLL
    for (int n = 1; n < 8; n *= 2) {
      const float other = pc_shuffle_xor(x, n < Tile::kOwnTokens ? n : 16);
      x = kLargest ? pc_max(x, other) : x + other;
    }
    return x;
  }

  PC_MEMBER static void load_floats(const Shared<float>& source, int at, float (&x)[4]) {
    const pc_vector four = source.load_vector(at);
    PC_UNROLL
    for (int i = 0; i < 4; ++i) x[i] = pc_bits_to_float(four.word[i]);
  }

  PC_MEMBER void add_keys_to(int quad, const PcAttentionParams& p, const ScoreRule& rule, const Shared<pc_uint8>& keys,
                             int token, bool edge) {
    float s[4 * Tile::kOwnTokens];
    PC_UNROLL
    for (int i = 0; i < 4 * Tile::kOwnTokens; ++i) s[i] = 0.0f;
    PC_UNROLL
    for (int v = 0; v < Tile::kVectors; ++v) {
      float q[4][4];
      PC_UNROLL
      for (int r = 0; r < 4; ++r) load_floats(queries_, (first_row_ + 4 * quad + r) * kDim + Tile::dim(v), q[r]);
      PC_UNROLL
      for (int t = 0; t < Tile::kOwnTokens; ++t) {
        float k[4];
        load_floats(keys.template as<float>(), (t * Tile::kParts + Tile::part()) * kDim + Tile::dim(v), k);
        PC_UNROLL
        for (int r = 0; r < 4; ++r) {
          PC_UNROLL
          for (int i = 0; i < 4; ++i) s[r * Tile::kOwnTokens + t] = pc_fma(q[r][i], k[i], s[r * Tile::kOwnTokens + t]);
        }
      }
    }
    float score = exchange_sums<Tile::kLanes>(s);
    const int j = token + token_of_lane();
    bool attended = 4 * quad + row_of_lane() < num_rows_;
    if (Options::kFull || edge) {
      const ScoreRow row = score_rows_.load(first_row_ + min_of(4 * quad + row_of_lane(), num_rows_ - 1));
      score = change_score<Options>(rule, row, score, j);
      attended = attended && attends<Options>(p, row, j);
    }
    if (!attended) score = -pc_infinity();

    const float top = pc_max(top_[quad], over_tokens<true>(score));
    const float origin = -rule.factor * finite_or_zero(top);
    const float keep = top == top_[quad] ? 1.0f : pc_exp2(pc_fma(rule.factor, top_[quad], origin));
    const float weight = pc_exp2(pc_fma(rule.factor, score, origin));
    top_[quad] = top;
    sum_[quad] = pc_fma(sum_[quad], keep, weight);
    weights_.store(quad * 32 + token_of_lane() * 4 + row_of_lane(), attended ? weight : -1.0f);
    // Mostly a tile has no larger score than those before it.
    if (pc_ballot(keep != 1.0f) == 0) return;
    PC_UNROLL
    for (int r = 0; r < 4; ++r) {
      const float own = pc_shuffle(keep, r * Tile::kOwnTokens);
      PC_UNROLL
      for (int i = 0; i < 4 * Tile::kVectors; ++i) o_[4 * quad + r][i] *= own;
    }
  }

  Shared<ScoreRow> score_rows_;
  Shared<float> queries_, weights_;
  KeyRange common_;
  int sharers_;    // warps that have the same rows
  int first_row_;  // of the block's rows
  int num_rows_;
  float top_[Tile::kQuads];  // of the lane's row of each quad
  float sum_[Tile::kQuads];  // and of its own tokens only
  float o_[Tile::kRows][4 * Tile::kVectors];
};

// Where the warps' sums of an item, or of a piece of it, meet.
template <int kDim>
class GeneralExchange {
  using Tile = GeneralTile<kDim>;

 public:
  PC_MEMBER GeneralExchange(const Shared<pc_uint8>& shared, int stage)
      : sums_((shared + Tile::kRing.sums_begin()).template as<float>()),
        o_((shared + stage * Tile::kRing.stage_bytes).template as<float>()) {}

  PC_MEMBER Shared<float> sums(int warp) const { return sums_ + warp * Tile::kRows * 2; }
  PC_MEMBER Shared<float> o(int warp) const { return o_ + warp * (Tile::kRing.ring_bytes() / 4); }

  // N numbers of a row, over the warps that share it: what end_row and the output are made of.
  template <int N>
  struct Sums {
    float top, sum;
    float x[N];
  };

  template <int N>
  PC_MEMBER Sums<N> load(int row, int d, const Teams& teams) const {
    const int first = row / teams.rows * teams.warps, own = row % teams.rows;
    Sums<N> all = no_sums<N>();
    for (int w = first; w < first + teams.warps; ++w) all.top = pc_max(all.top, sums(w).load(2 * own));
    const float origin = finite_or_zero(all.top);
    for (int w = first; w < first + teams.warps; ++w) {
      const float weight = pc_exp2(sums(w).load(2 * own) - origin);
      all.sum = pc_fma(weight, sums(w).load(2 * own + 1), all.sum);
      PC_UNROLL
      for (int k = 0; k < N; ++k) all.x[k] = pc_fma(weight, o(w).load(own * kDim + d + k), all.x[k]);
    }
    return all;
  }

  template <int N>
  PC_MEMBER static Sums<N> no_sums() {
    Sums<N> all;
    all.top = -pc_infinity();
    all.sum = 0.0f;
    PC_UNROLL
    for (int k = 0; k < N; ++k) all.x[k] = 0.0f;
    return all;
  }

 private:
  Shared<float> sums_, o_;
};

// Which part of a whole tile has been summed, where its keys are summed in pieces (fold_tokens): the last joins what
// the pieces before it have left, largest lse and sum in shared memory, values in the worker's own partial rows.
struct Piece {
  bool folds;
  bool last;
  int index;
};

// The first of the rows that each worker of a batch-invariant plan has behind those of splits.
PC_DEVICE pc_int64 first_own_row(const PcAttentionParams& p) {
  const int query_tile = max_of(kPromptRows / (p.num_query_heads / p.num_kv_heads), 1);
  return p.num_partial_rows - static_cast<pc_int64>(pc_num_blocks_x() - pc_block_x()) * query_tile;
}

// The block's rows of item i, whose keys, or those of a piece, have all been seen: the output itself, the item's part
// of it, or what the next piece goes on with. Without keys nothing has been exchanged.
template <int N, int kDim>
PC_DEVICE void store_rows(const PcAttentionParams& p, const Heads& heads, const GeneralBlock<kDim>& block, int i,
                          const Piece& piece, const Shared<pc_uint8>& shared, int stage, bool has_keys) {
  using Exchange = GeneralExchange<kDim>;
  const Exchange exchange(shared, stage);
  const Shared<float> folds = (shared + GeneralTile<kDim>::kRing.folds_begin()).template as<float>();
  const int own_folds = piece.index % 2 * GeneralTile<kDim>::kRing.fold_rows;
  const int last_folds = GeneralTile<kDim>::kRing.fold_rows - own_folds;
  PcWorkItem item = load_item(p.schedule, i);
  const Splits splits = splits_of(item);
  fit_queries(p, item);
  const bool whole = splits.count == 1 && piece.last;
  const float value_scale = whole ? load_number(p.value_scale, heads.kv, 1.0f) : 1.0f;
  const int rows = block.rows(item), vectors = p.value_dim / N;
  for (int task = pc_thread(); task < rows * vectors; task += pc_num_threads()) {
    const int row = task / vectors, d = task % vectors * N;
    const int query = (block.first_row + row) / heads.count, query_row = item.query_begin + query;
    const int head = heads.first + (block.first_row + row) % heads.count;
    const auto sums = has_keys ? exchange.template load<N>(row, d, block.teams(rows)) : Exchange::template no_sums<N>();
    const float sink = whole ? load_sink(p, head) : -pc_infinity();
    RowEnd end = end_row(sums.top, sums.sum, piece.folds ? -pc_infinity() : sink);
    float x[N];
    PC_UNROLL
    for (int k = 0; k < N; ++k) x[k] = sums.x[k] * (piece.folds ? end.factor : end.factor * value_scale);
    if (piece.folds) {
      const pc_int64 kept = ((first_own_row(p) + query) * p.num_query_heads + head) * p.value_dim + d;
      JoinedRow<N> joined;
      joined.clear();
      if (piece.index != 0) {
        joined.top = folds.load(2 * (last_folds + row));
        joined.sum = folds.load(2 * (last_folds + row) + 1);
        load_floats<N>(Global<float>(p.partial_out), kept, joined.x);
      }
      joined.add(end.lse, x);
      if (!piece.last) {
        store_floats<N>(PC_FLOAT32, p.partial_out, kept, joined.x);
        if (d == 0) folds.store(2 * (own_folds + row), joined.top);
        if (d == 0) folds.store(2 * (own_folds + row) + 1, joined.sum);
        continue;
      }
      end = joined.end(sink);
      PC_UNROLL
      for (int k = 0; k < N; ++k) x[k] = joined.x[k] * (end.factor * value_scale);
    }
    if (whole) {
      store_floats<N>(p.query_type, p.out.data, row_offset(p.out, query_row, head) + d, x);
      if (d == 0) store_lse(p, query_row, head, end.lse);
    } else {
      store_partial<N>(p, splits.row(query), head, d, x);
      if (d == 0) store_partial_lse(p, splits.row(query), head, end.lse);
    }
  }
}

template <int kDim>
PC_DEVICE void store_item(const PcAttentionParams& p, const Heads& heads, const GeneralBlock<kDim>& block, int i,
                          const Piece& piece, bool by_four, const Shared<pc_uint8>& shared, int stage, bool has_keys) {
  if (by_four) {
    store_rows<4, kDim>(p, heads, block, i, piece, shared, stage, has_keys);
  } else {
    store_rows<1, kDim>(p, heads, block, i, piece, shared, stage, has_keys);
  }
}

// Joins the parts of item i's tile where this CTA was the last of them.
PC_DEVICE void join_item(const PcAttentionParams& p, const Heads& heads, int i, bool by_four, const Shared<int>& flag) {
  PcWorkItem item = load_item(p.schedule, i);
  const Splits splits = splits_of(item);
  fit_queries(p, item);
  if (by_four) {
    join_if_last<4>(p, heads, item, splits, flag);
  } else {
    join_if_last<1>(p, heads, item, splits, flag);
  }
}

template <int kDim, typename Options>
PC_KERNEL(pc_general_shape(kDim).threads, pc_general_shape(kDim).blocks_per_sm)
void general(const PcAttentionParams p) {
  using Tile = GeneralTile<kDim>;
  using ItemRounds = Rounds<Tile::kTokens, Tile::kWarps>;
  const Shared<pc_uint8> shared = pc_shared_buffer();
  const Heads heads = block_heads(p);
  const int padding = first_padding_row(p);
  const WorkRange work = load_work(p.schedule, pc_block_x());
  const ScoreRule rule = make_rule<Options>(p, heads.kv);
  GeneralRing<kDim> ring(p, shared, heads);
  GeneralRows<kDim, Options> rows(shared);
  // Whether results can be written four at a time.
  const pc_int64 element = p.query_type == PC_FLOAT32 ? 4 : 2;
  const pc_uint64 places = p.out.token_stride | p.out.head_stride | p.value_dim;
  const bool by_four = places % 4 == 0 && p.out.data % (4 * element) == 0;

  GeneralBlock<kDim> block = {heads.count, 0, p.fold_tokens != 0};
  for (bool more = true; more; block.first_row += Tile::kWarps * Tile::kRows) {
    more = false;
    ring.start(p, work, block);
    // A pass of this loop is one round of an item, or an item without keys.
    int i = work.first - 1, rounds = 0, token = 0, join = -1;  // `token`: the first of the round
    KeyRange keys = {0, 0};
    Piece piece = {false, true, 0};
    int stage = 0, num_used = Tile::kStages;  // stages that can be filled: this one and those behind it
    while (true) {
      for (; num_used > 0; --num_used) {
        ring.fill(p, stage);
        stage = Tile::next(stage);
      }
      // All stages are on their way, and `stage` is the oldest.
      if (rounds == 0) {
        if (join >= 0) join_item(p, heads, join, by_four, (shared + Tile::kRing.flag_begin()).template as<int>());
        join = -1;
        if (++i >= work.end) break;
        PcWorkItem item = load_item(p.schedule, i);
        const Splits splits = splits_of(item);
        const Sequence sequence = load_sequence(p, item.sequence);
        fit_item(p, sequence, item);
        if (block.rows(item) == 0) continue;
        const bool ends = item.query_count * heads.count <= block.first_row + Tile::kWarps * Tile::kRows;
        more = more || !ends;
        if (ends && splits.count > 1) join = i;
        rows.start(p, heads, sequence, item, block, rule.negate);
        rounds = ItemRounds::count(item);
        token = ItemRounds::first_token(item);
        keys = {item.key_begin, item.key_end};
        piece.folds = p.fold_tokens != 0 && splits.count == 1 && rounds != 0 &&
                      item.key_begin / p.fold_tokens != (item.key_end - 1) / p.fold_tokens;
        piece.index = 0;
        pc_sync_block();
        if (rounds == 0) {
          piece.last = true;
          store_item(p, heads, block, i, piece, by_four, shared, stage, false);
          pc_sync_block();
          continue;
        }
      }

      const bool wanted = keys.meets(token + pc_warp() * Tile::kTokens, Tile::kTokens);
      ring.wait(stage, wanted);
      const bool own_tile_only = rows.sharers() == Tile::kWarps;
      if (!own_tile_only) pc_sync_block();
      for (int w = pc_warp() % rows.sharers(); rows.has_rows() && w < Tile::kWarps; w += rows.sharers()) {
        const int first = token + w * Tile::kTokens;
        if (!keys.meets(first, Tile::kTokens)) continue;
        rows.add_keys(p, rule, ring.keys(stage, w), first);
        rows.add_values(ring.values(stage, w));
      }
      token += ItemRounds::kStep;
      num_used = 1;
      piece.last = --rounds == 0;
      if (!own_tile_only) pc_sync_block();
      if (piece.last || (piece.folds && token % p.fold_tokens == 0)) {
        const GeneralExchange<kDim> exchange(shared, stage);
        rows.store(exchange.sums(pc_warp()), exchange.o(pc_warp()), rule.factor);
        pc_sync_block();
        store_item(p, heads, block, i, piece, by_four, shared, stage, true);
        pc_sync_block();
        ++piece.index;
        rows.clear();
      }
    }
  }
  clear_padding(p, heads, padding);
  pc_wait_copies<0>();
}

}  // namespace pagecore
