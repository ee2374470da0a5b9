// Attention of many queries: 16-bit caches, dims that are multiples of 8, up to 256.
//
// An instance computes with kDim dims of keys and kValueDim of values (pc_matrix_dims); dims past those of the call are
// zeros that are never read from the cache (tile_rows.cuh), and are not written to the output.
//
// A CTA is one worker of the schedule for one key head. Its items have up to 128 packed rows, query * heads + head, so
// that a tile of keys and values is read once for all query heads that share it. Every warp has rows of its own and
// meets all keys:
//
//                64 keys of a tile (32 above 128 values)
//              +--------------------------+
//   warp 0     |                          |   Q   shared memory, ldmatrix
//   warp 1     |  S = Q K^T               |   K   shared memory, ldmatrix; what a warp loads serves all of its rows
//   warp 2     |                          |   S   registers, weights are repacked as left operand
//   warp 3     +--------------------------+
//                kValueDim
//              +--------------------------+   V   shared memory, ldmatrix transposed
//   warp ...   |  O += P V                |   O   registers
//              +--------------------------+
//
// A warp has 32 rows, so that each fragment of K and V is multiplied twice, and 16 where the registers hold no more:
// more than 128 values, and scores that are changed (Full).
//
// Copies: one tile of keys and one of values. The values are on their way while their keys are multiplied, the next
// keys while the values are; the other CTA of the multiprocessor fills what gaps are left. Slots are looked up in the
// table two tiles ahead. Keys that no row of the item attends to are not read, zeros stand in their place.
//
// Sums that do not depend on the batch: keys come in pieces of p.fold_tokens, each summed by itself. The last one of a
// split tile's pieces joins them all; of a tile that is not split the pieces are folded into rows that the worker has
// for itself behind the partial rows of splits, by the same steps.
//
// Shared memory: rows of keys, values and queries have their 16-byte chunks permuted (tile_rows.cuh).
//
// Variants, which a call uses only where use_prefill_variant selects one, until a GPU has shown which is faster:
//
//   SlotsFirst   a thread reads all of its slots of a tile before its first copy: after a copy, the compiler moves no
//                read of shared memory forward. The sums are the same bit for bit.
//   WholeTile    S is held for all keys of a tile at once: query fragments are loaded once for a tile rather than
//   twice,
//                and O is rescaled once. The softmax counts from other maxima, so that sums differ by rounding.
//
// Bytes: queries once, keys and values once for each 128 rows (mostly from the second-level cache), output once.

#include "prefill_feed.cuh"
#include "prefill_output.cuh"
#include "prefill_rows.cuh"

namespace pagecore {

// The tiles of item i, and its rows. All threads meet before it.
template <typename Tile>
PC_DEVICE void run_item(const PcAttentionParams& p, const Heads& heads, int i, const Shared<pc_uint8>& shared) {
  using Options = typename Tile::Options;
  // The part whose scores become weights once the keys have been released. A whole tile has none: its scores would take
  // twice the registers of weights while the next keys are looked up.
  constexpr int kLate = 1;
  const ScoreRule rule = make_rule<Options>(p, heads.kv);
  PrefillFeed<Tile> feed(shared);
  PrefillRows<Tile> rows(shared, rule);
  PrefillSums<Tile> sums;
  const PrefillOutput<Tile> output(shared, rule.factor);
  KeyRange keys;
  {
    const PrefillItem item(p, i);
    keys = item.keys();
    copy_queries<Tile>(p, heads, item, shared);
    feed.start(p, item, i);
    rows.start(p, heads, item);
    sums.clear();
  }
  pc_sync_block();
  int token = keys.begin / Tile::kTokens * Tile::kTokens;
  feed.look_up(p, keys, token);
  feed.store_key_slots(p);
  feed.store_value_slots(p);
  pc_sync_block();
  feed.copy_keys(p, keys, token);
  feed.look_up(p, keys, token + Tile::kTokens);
  if (rule.negate) {
    pc_wait_copies<0>();
    negate_queries<Tile>(shared);
  }

  for (; token < keys.end; token += Tile::kTokens) {
    pc_wait_copies<0>();
    pc_sync_block();  // the keys are there, and nobody needs the values before
    feed.copy_values(p, keys, token);
    feed.store_key_slots(p);
    bool attends[Tile::kParts];
    PC_UNROLL
    for (int part = 0; part < Tile::kParts; ++part) attends[part] = rows.attends_to(token + part * Tile::kKeys);
    PC_UNROLL
    for (int part = 0; part < Tile::kParts; ++part) {
      if (!attends[part]) continue;
      rows.multiply_keys(part * Tile::kKeys);
      if (part != kLate) rows.weigh_keys(p, token + part * Tile::kKeys, sums);
    }
    pc_wait_copies<0>();
    pc_sync_block();  // the values are there, and nobody needs the keys
    if (token + Tile::kTokens < keys.end) feed.copy_keys(p, keys, token + Tile::kTokens);
    feed.store_value_slots(p);
    feed.look_up(p, keys, token + 2 * Tile::kTokens);

    pc_uint64 found = 0;
    if (feed.is_edge(token) || (Options::kFull && p.mask != 0)) found = find_not_finite<Tile>(shared);
    PC_UNROLL
    for (int part = 0; part < Tile::kParts; ++part) {
      const int first = part * Tile::kKeys;
      if (part == kLate && attends[part]) rows.weigh_keys(p, token + first, sums);
      if (found != 0) {
        const auto own = static_cast<typename Tile::PartBits>(found >> first & Tile::kPartMask);
        if (attends[part]) sums.add_by_hand(shared, own, first);
        pc_sync_block();
        clear_values<Tile>(shared, own, first);
        pc_sync_block();
      }
      if (attends[part]) sums.add_values(shared, first);
    }
    // Items of split tiles end there.
    const int next = token + Tile::kTokens;
    if (p.fold_tokens != 0 && next % p.fold_tokens == 0 && next < keys.end) {
      output.fold(p, block_heads_again(p), PrefillItem(p, feed.item()),
                  token / p.fold_tokens == keys.begin / p.fold_tokens, false, sums);
    }
  }
  pc_wait_copies<0>();
  pc_sync_block();  // also where there was no tile, nobody needs the queries

  const PrefillItem item(p, feed.item());
  const Heads own_heads = block_heads_again(p);
  if (item.splits.count > 1) {
    output.store_part(p, own_heads, item, sums);
  } else if (p.fold_tokens != 0) {
    const int last = max_of(keys.end - 1, keys.begin);
    output.fold(p, own_heads, item, last / p.fold_tokens == keys.begin / p.fold_tokens, true, sums);
  } else {
    output.store_whole(p, own_heads, item, sums);
  }
}

// Joins the parts of item i's tile where this CTA was the last of them.
PC_DEVICE void join_item(const PcAttentionParams& p, const Heads& heads, int i, const Shared<int>& flag) {
  const PrefillItem item(p, i);
  if (item.splits.count > 1 && is_last_part(p, item.splits, flag)) {
    join_splits<4>(p, heads, item.work, item.splits);
  }
}

template <typename T, int kDim, typename Options, int kValueDim = kDim>
PC_KERNEL(pc_prefill_shape(kDim, kValueDim, Options::kFull).threads,
          pc_prefill_shape(kDim, kValueDim, Options::kFull).blocks_per_sm)
void prefill(const PcAttentionParams p) {
  using Tile = PrefillTile<T, kDim, Options, kValueDim>;
  const Shared<pc_uint8> shared = pc_shared_buffer();
  const Shared<ItemSpan> span = (shared + Tile::kShape.item_begin()).template as<ItemSpan>();
  int next = load_work(p.schedule, pc_block_x()).first;
  while (next < load_work(p.schedule, pc_block_x()).end) {
    run_item<Tile>(p, block_heads_again(p), next, shared);
    join_item(p, block_heads_again(p), span.load(0).item, (shared + Tile::kShape.words_begin()).template as<int>());
    next = span.load(0).item + 1;
    pc_sync_block();
  }
  clear_padding(p, block_heads(p), first_padding_row(p));
}

}  // namespace pagecore
