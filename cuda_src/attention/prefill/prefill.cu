// Attention of many queries: 16-bit caches, dims that are multiples of 8, up to 256.
//
// An instance computes with kDim dims of keys and kValueDim of values (pc_matrix_dims). Dims past those of the call are
// zeros in shared memory, are never read from the cache (tiles.cuh) and are not written to the output.
//
// A CTA is one worker of the schedule for one key head. An item has up to 128 packed rows, query * heads + head, so
// that a tile of keys and values is read once for all query heads that share it. Every warp has rows of its own and
// processes all keys:
//
//                64 keys of a tile, or 32
//              +--------------------------+
//   warp 0     |                          |   Q   shared memory, ldmatrix
//   warp 1     |  S = Q K^T               |   K   shared memory, ldmatrix; a warp uses a fragment for all of its rows
//   warp 2     |                          |   S   registers, weights are repacked as left operand
//   warp 3     +--------------------------+
//                kValueDim
//              +--------------------------+   V   shared memory, ldmatrix transposed
//   warp ...   |  O += P V                |   O   registers
//              +--------------------------+
//
// A warp has 32 rows, so that each fragment of K and V is used twice. It has 16 rows where registers are short: for a
// kValueDim above 128, and for transformed scores (Full). A tile has 32 keys where shared memory is short: for a
// kValueDim above 128, and over sealed blocks for a kDim above 128.
//
// In flight: one tile of keys or one of values. The values are copied while their keys are multiplied, and the next
// keys while the values are multiplied. The other CTA of the multiprocessor fills the remaining gaps. Slots are looked
// up in the table two tiles ahead. Keys that no row of the item attends to are not read; their rows are zero.
//
//   load         queries, slots and keys of the first tile
//   for each tile, in two parts:
//     score        S = Q K^T; values in flight
//     softmax      weights from S, O rescaled
//     accumulate   O += P V; the next keys in flight
//     fold         after the last tile of a piece
//   store        the output, partial rows, or the last fold
//
// Batch-invariant sums: keys are summed in pieces of p.fold_tokens. The last CTA of a split tile joins its pieces. For
// a tile that is not split, the worker folds the pieces one after the other into partial rows of its own, after those
// of splits, by the same arithmetic.
//
// Variants, which a call uses only if use_prefill_variant selects one, until a GPU shows which is faster:
//
//   SlotsFirst   a thread loads all of its slots of a tile before its first copy, because the compiler moves no load of
//                shared memory ahead of a copy. Results have the same bits.
//   WholeTile    S is held for all keys of a tile at once: query fragments are loaded once for each tile instead of
//                twice, and O is rescaled once. The softmax is relative to other maxima, so that results differ by
//                rounding.
//
// Bytes: queries are read once, keys and values once for each 128 rows (mostly from L2), the output is written once.
//
// prefill_stored has the same phases over codes of 8 or 4 bits (stored.cuh), and prefill_sealed over sealed blocks and
// the 16-bit caches of the tokens after them (sealed.cuh).

#include "cuda_src/attention/prefill/feed.cuh"
#include "cuda_src/attention/prefill/output.cuh"
#include "cuda_src/attention/prefill/rows.cuh"
#include "cuda_src/attention/prefill/sealed.cuh"
#include "cuda_src/attention/prefill/stored.cuh"

namespace pagecore {

// The phases of an item. A barrier of the block must precede `load`. Feed, rows and sums are variables of run_item: as
// members they cost 9 registers at head dim 96 on sm_80.
template <typename Tile, typename Feed, typename Scales>
class PrefillItemRun {
  using Options = typename Tile::Options;
  // The softmax of this part runs after the keys have been released for the next copy. A tile in one part has no such
  // part: its scores would take twice the registers of its weights during the look-up of the next slots.
  static constexpr int kLatePart = 1;

 public:
  // Parts of a tile that the warp's rows attend to.
  struct Parts {
    bool attended[Tile::kParts];
  };

  PC_MEMBER PrefillItemRun(const Shared<pc_uint8>& shared, const ScoreRule& rule, Feed& feed,
                           PrefillRows<Tile, Scales>& rows, PrefillSums<Tile>& sums)
      : shared_(shared), feed_(feed), rows_(rows), sums_(sums), output_(shared, rule.factor), keys_{0, 0} {}

  // Loads the queries, and starts the copies of the first keys. Returns the first token of the first tile.
  PC_MEMBER int load(const PcAttentionParams& p, const Heads& heads, int i, bool negate) {
    {
      const auto item = PrefillItem::load<Options>(p, i);
      keys_ = item.keys();
      copy_queries<Tile>(p, heads, item, shared_);
      feed_.start(p, item, i);
      rows_.load(p, heads, item);
      sums_.clear();
    }
    pc_sync_block();
    const int token = keys_.begin / Tile::kTokens * Tile::kTokens;
    feed_.begin(p, keys_, token);
    if (negate) {
      pc_wait_copies<0>();
      negate_queries<Tile>(shared_);
    }
    return token;
  }

  PC_MEMBER bool has_tile(int token) const { return token < keys_.end; }

  // S of the tile at `token`, and its weights but for the late part. Starts the copy of the tile's values.
  PC_MEMBER Parts score(const PcAttentionParams& p, int token) {
    feed_.open_keys(p, keys_, token);
    Parts parts;
    PC_UNROLL
    for (int part = 0; part < Tile::kParts; ++part) parts.attended[part] = rows_.attends_to(first_key(token, part));
    PC_UNROLL
    for (int part = 0; part < Tile::kParts; ++part) {
      if (!parts.attended[part]) continue;
      rows_.score(part * Tile::kKeys);
      if (part != kLatePart) rows_.softmax(p, first_key(token, part), sums_);
    }
    return parts;
  }

  // O += P V of the tile. Starts the copy of the next keys.
  PC_MEMBER void accumulate(const PcAttentionParams& p, int token, const Parts& parts) {
    feed_.open_values(p, keys_, token);
    pc_uint64 not_finite = 0;
    if (feed_.is_edge(token) || (Options::kFull && masks_all_keys(p))) not_finite = find_not_finite<Tile>(shared_);
    PC_UNROLL
    for (int part = 0; part < Tile::kParts; ++part) {
      const int first = part * Tile::kKeys;
      if (part == kLatePart && parts.attended[part]) rows_.softmax(p, token + first, sums_);
      if (not_finite != 0) {
        const auto own = static_cast<typename Tile::PartBits>(not_finite >> first & Tile::kPartMask);
        if (parts.attended[part]) sums_.accumulate_not_finite(shared_, own, first);
        pc_sync_block();
        clear_values<Tile>(shared_, own, first);
        pc_sync_block();
      }
      if (parts.attended[part]) sums_.accumulate(shared_, first);
    }
  }

  // Folds the piece that ends with the tile at `token`, unless it is the item's last. The items of split tiles end with
  // their piece.
  PC_MEMBER void fold(const PcAttentionParams& p, int token) {
    const int next = token + Tile::kTokens;
    if (p.fold_tokens != 0 && next % p.fold_tokens == 0 && next < keys_.end) {
      rows_.drop_units(sums_);
      output_.fold(p, recompute_block_heads(p), PrefillQueries(p, feed_.item()), is_first_piece(p, token), false,
                   sums_);
    }
  }

  // Writes the rows.
  PC_MEMBER void store(const PcAttentionParams& p) {
    pc_wait_copies<0>();
    pc_sync_block();  // all warps are done with the queries, also in an item without tiles
    rows_.drop_units(sums_);
    const PrefillQueries item(p, feed_.item());
    const Heads heads = recompute_block_heads(p);
    if (item.splits.count > 1) {
      output_.store_part(p, heads, item, sums_);
    } else if (p.fold_tokens != 0) {
      output_.fold(p, heads, item, is_first_piece(p, max_of(keys_.end - 1, keys_.begin)), true, sums_);
    } else {
      output_.store_whole(p, heads, item, sums_);
    }
  }

 private:
  PC_MEMBER static int first_key(int token, int part) { return token + part * Tile::kKeys; }

  PC_MEMBER bool is_first_piece(const PcAttentionParams& p, int token) const {
    return token / p.fold_tokens == keys_.begin / p.fold_tokens;
  }

  Shared<pc_uint8> shared_;
  Feed& feed_;
  PrefillRows<Tile, Scales>& rows_;
  PrefillSums<Tile>& sums_;
  PrefillOutput<Tile> output_;
  KeyRange keys_;
};

template <typename Tile, typename Feed, typename Scales>
PC_DEVICE void run_item(const PcAttentionParams& p, const Heads& heads, int i, const Shared<pc_uint8>& shared,
                        Feed feed, const Scales& scales) {
  const ScoreRule rule = make_rule<typename Tile::Options>(p, heads.kv);
  PrefillRows<Tile, Scales> rows(shared, rule, scales);
  PrefillSums<Tile> sums;
  PrefillItemRun<Tile, Feed, Scales> item(shared, rule, feed, rows, sums);
  for (int token = item.load(p, heads, i, rule.negate); item.has_tile(token); token += Tile::kTokens) {
    const auto parts = item.score(p, token);
    item.accumulate(p, token, parts);
    item.fold(p, token);
  }
  item.store(p);
}

// Joins the parts of item i's tile if this CTA is the last to write one. Tiles of prompts have few parts: one level.
PC_DEVICE void join_item(const PcAttentionParams& p, const Heads& heads, int i, const Shared<int>& flag) {
  const PrefillQueries item(p, i);
  const Splits& splits = item.splits;
  if (splits.count > 1 && is_last_part(p, splits.first_row, splits.count, flag)) {
    join_parts<4>(p, heads, item.work, {splits.first_row, splits.step, splits.count}, true);
  }
}

// Attends to the items of the CTA.
template <typename Tile, typename Feed, typename Scales>
PC_DEVICE void run_items(const PcAttentionParams& p, const Shared<pc_uint8>& shared, const Feed& feed,
                         const Scales& scales) {
  // The number of the item is kept in shared memory, not in a register.
  const Shared<ItemSpan> span = (shared + Tile::kShape.item_begin()).template as<ItemSpan>();
  int next = load_work(p.schedule, pc_block_x()).first;
  while (next < load_work(p.schedule, pc_block_x()).end) {
    run_item<Tile>(p, recompute_block_heads(p), next, shared, feed, scales);
    join_item(p, recompute_block_heads(p), span.load(0).item, (shared + Tile::kShape.words_begin()).template as<int>());
    next = span.load(0).item + 1;
    pc_sync_block();
  }
  clear_padding(p, block_heads(p), first_padding_row(p));
}

template <typename T, int kDim, typename Options, int kValueDim = kDim>
PC_KERNEL(pc_prefill_shape(kDim, kValueDim, Options::kFull).threads,
          pc_prefill_shape(kDim, kValueDim, Options::kFull).blocks_per_sm)
void prefill(const PcAttentionParams p) {
  using Tile = PrefillTile<T, kDim, Options, kValueDim>;
  const Shared<pc_uint8> shared = pc_shared_buffer();
  run_items<Tile>(p, shared, PrefillFeed<Tile>(shared), NoScales());
}

// Keys and values are of stored formats with codes of kBits (stored.cuh).
template <typename T, int kBits, int kDim, typename Options>
PC_KERNEL(pc_prefill_stored_shape(kBits, kDim, Options::kFull).threads,
          pc_prefill_stored_shape(kBits, kDim, Options::kFull).blocks_per_sm)
void prefill_stored(const PcStoredAttentionParams params) {
  using Tile = PrefillStoredTile<T, kBits, kDim, Options>;
  const Shared<pc_uint8> shared = pc_shared_buffer();
  run_items<Tile>(params.attention, shared, StoredFeed<Tile>(params, shared), StoredScales<Tile>(params, shared));
}

// The first tokens of sequences are in sealed blocks (sealed.cuh).
template <typename T, int kDim, typename Options, int kValueDim = kDim>
PC_KERNEL(pc_prefill_sealed_shape(kDim, kValueDim, Options::kFull).threads,
          pc_prefill_sealed_shape(kDim, kValueDim, Options::kFull).blocks_per_sm)
void prefill_sealed(const PcSealedAttentionParams params) {
  using Tile = PrefillSealedTile<T, kDim, Options, kValueDim>;
  const Shared<pc_uint8> shared = pc_shared_buffer();
  run_items<Tile>(params.attention, shared, SealedFeed<Tile>(shared), NoScales());
}

}  // namespace pagecore
