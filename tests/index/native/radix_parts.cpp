// Parts of the radix tree at edge cases that random calls rarely reach: long probes, page edges, ties.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "pagecore/index/radix/nodes/child_map.hpp"
#include "pagecore/index/radix/nodes/namespaces.hpp"
#include "pagecore/index/radix/nodes/node_heap.hpp"
#include "pagecore/index/radix/nodes/node_storage.hpp"
#include "pagecore/index/radix/retention/held_ids.hpp"
#include "tests/index/native/radix_memory.hpp"
#include "tests/native/harness.hpp"

using namespace pagecore;
using namespace pagecore::radix;
using namespace pagecore::test;

namespace {

// Few different hashes, some with their home at the end, so that probes are long and wrap around.
uint32_t some_hash(Random& random) {
  const uint32_t near_end = UINT32_MAX - static_cast<uint32_t>(random.below(3)) * 0x08000000u;
  return random.pick({0u, 1u, 0x10000000u, near_end, near_end, static_cast<uint32_t>(random.bits())});
}

// Marks of `blocks` blocks, as in a query: none, one or several for each block.
std::vector<Mark> some_marks(Random& random, int64_t blocks) {
  std::vector<Mark> marks;
  for (int64_t b = 0; b < blocks; ++b) {
    for (int64_t left = random.pick({0, 0, 0, 1, 2}); left > 0; --left) {
      Mark mark{static_cast<int32_t>(b), random.between(-1, 1), random.between(2, 3), {}};
      mark.digest.kind = static_cast<int32_t>(random.below(2));
      mark.digest.bytes[31] = static_cast<uint8_t>(random.below(2));
      marks.push_back(mark);
    }
  }
  return marks;
}

std::vector<Mark> of_block(const std::vector<Mark>& marks, int64_t block) {
  std::vector<Mark> found;
  for (const Mark& mark : marks) {
    if (mark.block == block) found.push_back(mark);
  }
  return found;
}

bool same_marks(const std::vector<Mark>& a, const std::vector<Mark>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Mark& x, const Mark& y) {
    return x.start == y.start && x.end == y.end && x.digest.kind == y.digest.kind && x.digest.bytes == y.digest.bytes;
  });
}

// Contents of slices, block by block: tokens, ids of each lane, starts of marks.
std::vector<std::vector<int32_t>> content(const StoragePool& pool, StorageId id, const std::vector<Slice>& slices,
                                          int64_t size) {
  std::vector<std::vector<int32_t>> blocks;
  for (const Slice& slice : slices) {
    for (int32_t b = slice.start; b < slice.start + slice.size; ++b) {
      blocks.emplace_back(pool.tokens(id, b), pool.tokens(id, b) + size);
      for (int32_t lane = 0; lane < 2; ++lane) blocks.back().push_back(pool.lane(pool[id], lane)[b]);
      for (const Mark& mark : of_block(pool[id].marks, b)) blocks.back().push_back(static_cast<int32_t>(mark.start));
    }
  }
  return blocks;
}

}  // namespace

PC_TEST(child_map_finds_what_it_holds) {
  rounds(60, [](Random& random) {
    ChildMap map;
    std::map<NodeId, uint32_t> model;
    NodeId next = 0;
    for (int i = 0; i < 400; ++i) {
      const int64_t kind = random.below(i < 200 ? 6 : 9);
      if (kind < 4) {
        const auto count = static_cast<int32_t>(random.between(1, 3));
        map.reserve(count);
        for (int32_t k = 0; k < count; ++k) {
          const uint32_t hash = model[next] = some_hash(random);
          const ShortMemory none(0);
          map.add(hash, next);
          ++next;
        }
      } else if (!model.empty()) {
        const auto [child, hash] = random.pick(model);
        if (kind == 4) {
          map.replace(hash, child, next);
          model[next++] = hash;
        } else {
          map.erase(hash, child);
        }
        model.erase(child);
        if (random.one_in(8)) map.shrink();
      }
      map.check_invariants();
      PC_CHECK(map.size() == std::ssize(model), map.size(), " entries, expected ", model.size());
      for (const auto& [child, hash] : model) {
        if (i % 20 != 0) break;
        PC_CHECK(map.find(hash, [&](NodeId it) { return it == child; }) == child, "child ", child, " is lost");
      }
      PC_CHECK(map.find(some_hash(random), [&](NodeId it) { return !model.contains(it); }) == kNoNode, "a stranger");
    }
    const size_t large = map.nbytes();
    for (const auto& [child, hash] : model) {
      map.erase(hash, child);
      map.shrink();
      map.check_invariants();
    }
    PC_CHECK(map.nbytes() <= large && map.nbytes() == ChildMap().nbytes(), map.nbytes(), " bytes for nothing");
  });
}

PC_TEST(child_map_is_unchanged_if_it_cannot_shrink) {
  ChildMap map;
  map.reserve(1000);
  map.add(7, 1);
  const size_t before = map.nbytes();
  {
    const ShortMemory none(0);
    map.shrink();
    PC_CHECK(ShortMemory::has_failed(), "shrink() did not allocate");
  }
  map.check_invariants();
  PC_CHECK(map.nbytes() == before && map.find(7, [](NodeId it) { return it == 1; }) == 1, map.nbytes());
}

PC_TEST(node_heap_has_the_least_on_top) {
  rounds(80, [](Random& random) {
    NodeHeap heap;
    const auto nodes = static_cast<NodeId>(random.between(1, 60));
    heap.reserve(static_cast<size_t>(nodes));
    using Key = std::tuple<double, uint64_t, int32_t>;
    std::map<NodeId, Key> model;
    for (int i = 0; i < 300; ++i) {
      const auto node = static_cast<NodeId>(random.below(nodes));
      if (random.one_in(3)) {
        heap.erase(node);
        model.erase(node);
        continue;
      }
      const HeapKey key{static_cast<double>(random.below(3)), static_cast<uint64_t>(random.below(3)),
                        static_cast<int32_t>(random.below(3))};
      model[node] = {key.primary, key.turn, key.depth};
      const ShortMemory none(0);
      heap.put(node, key);
    }
    heap.check_invariants();
    PC_CHECK(heap.size() == std::ssize(model), heap.size());
    for (Key before{-1, 0, 0}; !heap.empty(); heap.erase(heap.top())) {
      const NodeId top = heap.top();
      const Key key = model.at(top);
      for (const auto& [node, other] : model) PC_CHECK(key <= other, "node ", node, " should precede ", top);
      PC_CHECK(before <= key && key == Key(heap.top_key().primary, heap.top_key().turn, heap.top_key().depth), top);
      before = key;
      model.erase(top);
    }
    PC_CHECK(model.empty(), model.size(), " are left");
    heap.check_invariants();
  });
}

PC_TEST(held_ids_hold_every_id) {
  rounds(30, [](Random& random) {
    HeldIds held;
    std::set<int32_t> model;
    for (int i = 0; i < 400; ++i) {
      const int32_t edge = random.pick({0, 64, 32768, 65536, 1 << 20, INT32_MAX - 2});
      const auto id = static_cast<int32_t>(std::max<int64_t>(0, edge + random.between(-2, 2)));
      PC_CHECK(held.holds(id) == model.contains(id), id);
      if (model.contains(id) && random.one_in(2)) {
        held.erase(id);
        model.erase(id);
      } else {
        PC_CHECK(held.add(id) == model.insert(id).second, id);
      }
      if (i % 50 == 0) PC_CHECK(held.count() == std::ssize(model), held.count());
    }
    PC_CHECK(held.count() == std::ssize(model), held.count());
  });
}

// Runs of neighbours, ascending and descending, some broken by an id, at the edges of words, pages and ids.
PC_TEST(held_ids_take_runs_at_once) {
  rounds(20, [](Random& random) {
    HeldIds held;
    std::set<int32_t> model;
    for (int i = 0; i < 60; ++i) {
      const int64_t edge = random.pick({0, 64, 4096, 32768, 65536, 1 << 20, INT32_MAX - 99});
      const int64_t first = std::max<int64_t>(0, edge + random.between(-40, 40));
      const int64_t count = std::min<int64_t>(random.between(1, 150), int64_t{INT32_MAX} + 1 - first);
      std::vector<int32_t> ids;
      for (int64_t k = 0; k < count; ++k) ids.push_back(static_cast<int32_t>(first + k));
      if (random.one_in(3)) std::swap(ids[static_cast<size_t>(random.below(count))], ids.back());
      for (size_t k = 0; k < ids.size();) {
        const size_t run = held.add_run(std::span<const int32_t>(ids).subspan(k));
        for (size_t end = k + run; k < end; ++k) {
          PC_CHECK(model.insert(ids[k]).second && ids[k] == ids[end - run] + static_cast<int32_t>(k - (end - run)),
                   ids[k]);
        }
        if (run > 0) continue;
        PC_CHECK(held.add(ids[k]) == model.insert(ids[k]).second, ids[k]);
        ++k;
      }
      PC_CHECK(held.count() == std::ssize(model), held.count());
      if (random.one_in(2)) {  // some of the same, and ids of other runs
        std::vector<int32_t> gone(model.begin(), model.end());
        if (random.one_in(2)) gone.resize(static_cast<size_t>(random.between(0, std::ssize(gone))));
        if (random.one_in(2)) std::reverse(gone.begin(), gone.end());
        if (!gone.empty() && random.one_in(3))
          std::swap(gone[static_cast<size_t>(random.below(std::ssize(gone)))], gone[0]);
        held.erase(std::span<const int32_t>(gone));
        for (const int32_t id : gone) model.erase(id);
      }
      std::vector<int32_t> listed;
      held.list(listed);
      PC_CHECK(std::equal(listed.begin(), listed.end(), model.begin(), model.end()), listed.size(), " are listed");
    }
  });
}

PC_TEST(held_ids_add_no_run_that_is_held_in_part_or_lacks_memory) {
  HeldIds held;
  std::vector<int32_t> ids;
  for (int32_t k = 0; k < 64; ++k) ids.push_back(32768 - 32 + k);  // in two pages
  {
    const ShortMemory one(1);
    bool is_short = false;
    try {
      static_cast<void>(held.add_run(ids));
    } catch (const std::bad_alloc&) {
      is_short = true;
    }
    PC_CHECK(is_short && held.count() == 0, held.count());
  }
  PC_CHECK(held.add(ids[63]) && held.add_run(ids) == 0 && held.count() == 1, held.count());
  held.erase(ids[63]);
  PC_CHECK(held.add_run(ids) == 64 && held.count() == 64, held.count());
  PC_CHECK(held.add_run(ids) == 0 && held.add_run({}) == 0, "held ids are added again");
}

PC_TEST(namespaces_are_reused_after_they_are_forgotten) {
  rounds(60, [](Random& random) {
    Namespaces namespaces;
    std::map<NamespaceId, int32_t> model{{0, 0}};  // number of children
    std::set<NamespaceId> dead;                    // empty, and not forgotten
    for (int i = 0; i < 300; ++i) {
      const auto [space, children] = random.pick(model);
      switch (random.below(4)) {
        case 0: {
          const NamespaceId made = namespaces.add();
          PC_CHECK(model.emplace(made, 0).second, "namespace ", made, " is in use");
          break;
        }
        case 1:
          namespaces.add_child(space);
          ++model[space];
          dead.erase(space);
          break;
        case 2: {
          {
            const ShortMemory none(0);
            if (children > 0) namespaces.remove_child(space);
            namespaces.drop_if_empty(space);
          }
          if (children > 0) --model[space];
          if (space != 0 && model[space] == 0) dead.insert(space);
          break;
        }
        default:
          if (random.one_in(2)) break;
          for (NamespaceId gone = namespaces.next_dead(); gone >= 0; gone = namespaces.next_dead()) {
            PC_CHECK(dead.erase(gone) == 1, "namespace ", gone, " is not dead");
            model.erase(gone);
            namespaces.forget_dead();
          }
          PC_CHECK(dead.empty(), dead.size(), " dead namespaces are left");
      }
      std::vector<int32_t> counted(namespaces.count());
      for (const auto& [each, number] : model) counted[static_cast<size_t>(each)] = number;
      namespaces.check_invariants(counted);
    }
  });
}

PC_TEST(common_tokens_stop_at_the_first_difference) {
  rounds(300, [](Random& random) {
    const int64_t count = random.pick(
        {int64_t{0}, int64_t{1}, int64_t{63}, int64_t{64}, int64_t{65}, int64_t{128}, random.between(0, 300)});
    Exact<int32_t> a(static_cast<size_t>(count)), b(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i)
      a[static_cast<size_t>(i)] = b[static_cast<size_t>(i)] = static_cast<int32_t>(random.bits());
    PC_CHECK(common_tokens(a.data(), b.data(), count) == count, count);
    for (int64_t left = 3; left > 0 && count > 0; --left) {
      const auto at = static_cast<size_t>(random.below(count));
      b[at] = static_cast<int32_t>(a[at] ^ (1u << random.below(32)));
      const auto [end, other] = std::mismatch(a.data(), a.data() + count, b.data());
      PC_CHECK(common_tokens(a.data(), b.data(), count) == end - a.data(), "differs at ", end - a.data());
    }
  });
}

PC_TEST(common_marks_stop_at_the_first_block_that_differs) {
  rounds(3000, [](Random& random) {
    const int64_t shift = random.below(3), blocks = random.between(0, 6);
    std::vector<Mark> left = some_marks(random, blocks), right = left;
    if (!right.empty() && random.one_in(2)) random.pick(right).end += random.below(2);
    if (!right.empty() && random.one_in(3)) right.erase(right.begin() + random.below(std::ssize(right)));
    if (random.one_in(8)) right = some_marks(random, blocks);
    int64_t expected = 0;
    while (expected < blocks && same_marks(of_block(left, expected), of_block(right, expected))) ++expected;
    for (Mark& mark : right) mark.block += static_cast<int32_t>(shift);
    if (shift > 0 && random.one_in(2)) right.insert(right.begin(), Mark{0, 5, 6, {}});  // before the range: ignored
    const int64_t count = random.between(0, blocks);
    PC_CHECK(common_marks(left, 0, right, shift, count) == std::min(expected, count), "expected ", expected);
    PC_CHECK(common_marks(right, shift, left, 0, count) == std::min(expected, count), "expected ", expected);
  });
}

PC_TEST(block_hash_depends_on_parent_tokens_and_marks) {
  rounds(200, [](Random& random) {
    const BlockHash hash(random.one_in(4) ? 0 : random.bits());
    const int64_t count = random.pick({1, 2, 3, 4, 5, 7, 8, 16, 33});
    Exact<int32_t> tokens(static_cast<size_t>(count));
    for (int32_t& token : tokens.span()) token = random.pick({0, 1, -1, static_cast<int32_t>(random.bits())});
    const std::vector<Mark> marks = some_marks(random, 2);
    const uint32_t was = hash(3, tokens.data(), count, marks, 1);
    PC_CHECK(hash(3, tokens.data(), count, of_block(marks, 1), 1) == was, "the hash depends on marks of other blocks");
    PC_CHECK(hash(4, tokens.data(), count, marks, 1) != was, "the hash ignores the parent");
    int32_t& token = tokens[static_cast<size_t>(random.below(count))];
    token ^= static_cast<int32_t>(1u << random.below(32));
    PC_CHECK(hash(3, tokens.data(), count, marks, 1) != was, "the hash ignores a token");
  });
}

// Counts equal hashes among 16,384 different blocks; a random function has 0.03 on average.
template <typename HashOf>
void spreads(HashOf&& hash_of, const char* family, int part) {
  constexpr int32_t kBlocks = 1 << 14;
  std::vector<uint32_t> hashes;
  for (int32_t i = 0; i < kBlocks; ++i) hashes.push_back(hash_of(i));
  std::sort(hashes.begin(), hashes.end());
  const auto end = std::unique(hashes.begin(), hashes.end());
  PC_CHECK(hashes.end() - end <= 3, hashes.end() - end, " equal hashes of ", family, " ", part);
}

PC_TEST(block_hash_distinguishes_families_of_blocks) {
  rounds(2, [](Random& random) {
    const BlockHash hash(random.bits());
    const std::vector<int32_t> zeros(16);
    const auto count = static_cast<int64_t>(zeros.size());
    for (const int bits : {0, 8, 18}) {  // count in the low, middle and high bits of the token
      for (size_t at = 0; at < zeros.size(); ++at) {
        spreads([&, tokens = zeros](
                    int32_t i) mutable { return tokens[at] = i << bits, hash(0, tokens.data(), count, {}, 0); },
                "tokens", static_cast<int>(at));
      }
      spreads([&](int32_t i) { return hash(i << bits, zeros.data(), count, {}, 0); }, "parents", bits);
    }
    Mark mark{0, 0, 1, {}};
    const auto of_mark = [&] { return hash(0, zeros.data(), count, std::span(&mark, 1), 0); };
    for (size_t at = 0; at + 1 < mark.digest.bytes.size(); ++at) {
      spreads(
          [&](int32_t i) {
            mark.digest.bytes[at] = static_cast<uint8_t>(i);
            mark.digest.bytes[at + 1] = static_cast<uint8_t>(i >> 8);
            return of_mark();
          },
          "digests", static_cast<int>(at));
    }
    spreads([&](int32_t i) { return mark.start = -i, of_mark(); }, "starts", 0);
    spreads([&](int32_t i) { return mark.end = i, of_mark(); }, "ends", 0);
    spreads([&](int32_t i) { return mark.digest.kind = i, of_mark(); }, "kinds", 0);
  });
}

PC_TEST(a_storage_is_sparse_if_less_than_two_thirds_are_live) {
  NodeStorage storage;
  for (const auto& [live, capacity, is_sparse] : {std::tuple{2, 3, false},
                                                  {1, 3, true},
                                                  {200, 300, false},
                                                  {199, 300, true},
                                                  {1 << 30, INT32_MAX, true},
                                                  {1, 1, false}}) {
    storage.live = live;
    storage.capacity = capacity;
    PC_CHECK(StoragePool::is_sparse(storage) == is_sparse, live, " of ", capacity);
  }
}

PC_TEST(storages_keep_their_slices_when_they_shrink) {
  rounds(300, [](Random& random) {
    const int64_t size = random.pick({1, 2, 16}), blocks = random.between(1, 12), first = random.below(3);
    StoragePool pool(size, 2);
    const int64_t more = random.below(2);
    Exact<int32_t> tokens(static_cast<size_t>((first + blocks + more) * size));
    for (int32_t& token : tokens.span()) token = static_cast<int32_t>(random.bits());
    const std::vector<Mark> marks = some_marks(random, first + blocks + more);
    NodeStorage made = pool.make({tokens.span(), marks, 0}, first, blocks);
    for (int32_t lane = 0; lane < 2; ++lane) {
      for (int64_t b = 0; b < blocks; ++b) pool.lane(made, lane)[b] = static_cast<int32_t>(100 * lane + b);
    }
    pool.reserve();
    const StorageId id = pool.add(std::move(made));
    for (int64_t b = 0; b < blocks; ++b) {
      PC_CHECK(std::equal(pool.tokens(id, b), pool.tokens(id, b) + size, tokens.data() + (first + b) * size), b);
      PC_CHECK(same_marks(of_block(pool[id].marks, b), of_block(marks, first + b)), "marks of block ", b);
    }
    PC_CHECK(of_block(pool[id].marks, blocks).empty(), "marks of blocks outside the storage");
    std::vector<Slice> slices;
    for (int32_t start = 0; start < blocks;) {
      const auto length = static_cast<int32_t>(random.between(1, blocks - start));
      if (random.one_in(2)) slices.push_back({start, length});
      start += length;
    }
    int32_t live = 0;
    for (const Slice& slice : slices) live += slice.size;
    pool[id].live = live;
    if (live > 0) {
      const auto before = content(pool, id, slices, size);
      const std::vector<Slice> places = slices;
      {
        const ShortMemory memory(random.below(3));
        static_cast<void>(pool.compact(id, slices));
        if (ShortMemory::has_failed()) slices = places;
      }
      PC_CHECK(content(pool, id, slices, size) == before, "blocks were lost");
      PC_CHECK(pool.compact(id, slices) && content(pool, id, slices, size) == before, "blocks were lost");
      PC_CHECK(pool.held_blocks() == live, pool.held_blocks());
    }
    pool.remove(id);
    PC_CHECK(pool.size() == 0 && pool.held_blocks() == 0, pool.size());
  });
}
