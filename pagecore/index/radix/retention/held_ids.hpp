// Set of ids: a bitmap in pages of 32,768 ids that are allocated on first use.
//
// Cost: O(1). Memory: 4 KiB for each page that holds an id, or held one before the last shrink(). Threads: one writer.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace pagecore::radix {

class HeldIds {
 public:
  [[nodiscard]] bool holds(int32_t id) const {
    const size_t page = page_of(id);
    return page < pages_.size() && pages_[page] != nullptr && ((*pages_[page])[word_of(id)] & bit_of(id)) != 0;
  }
  // Returns false if the id is held already. Allocates only for the first id of a page.
  [[nodiscard]] bool add(int32_t id) {
    const size_t page = page_of(id);
    if (page >= pages_.size()) pages_.resize(page + 1);
    if (pages_[page] == nullptr) pages_[page] = std::make_unique<Page>();
    uint64_t& word = (*pages_[page])[word_of(id)];
    const bool is_new = (word & bit_of(id)) == 0;
    word |= bit_of(id);
    return is_new;
  }
  // Allocates the pages of the ids 0 .. num_ids - 1 for good: add() of one of these ids cannot fail.
  void reserve(int32_t num_ids) {
    const size_t wanted = num_ids <= 0 ? 0 : page_of(num_ids - 1) + 1;
    if (wanted > pages_.size()) pages_.resize(wanted);
    for (size_t page = 0; page < wanted; ++page) {
      if (pages_[page] == nullptr) pages_[page] = std::make_unique<Page>();
    }
    num_reserved_ = std::max(num_reserved_, wanted);
  }
  // Adds ids from the front that are neighbours, id, id + 1, ..., if none of them is held; returns their number, or 0
  // for fewer than kRun. Allocates only for the first id of a page, and adds nothing if that fails.
  [[nodiscard]] size_t add_run(std::span<const int32_t> ids) {
    if (ids.empty() || ids[0] < 0) return 0;
    const size_t count = run_length<1>(ids);
    if (count == 0) return 0;
    bool is_new = true;
    for_each_word(ids[0], count, [&](size_t page, size_t word, uint64_t bits) {
      is_new = is_new && (page >= pages_.size() || pages_[page] == nullptr || ((*pages_[page])[word] & bits) == 0);
    });
    if (!is_new) return 0;
    const size_t last_page = page_of(ids[count - 1]);
    if (last_page >= pages_.size()) pages_.resize(last_page + 1);
    for (size_t page = page_of(ids[0]); page <= last_page; ++page) {
      if (pages_[page] == nullptr) pages_[page] = std::make_unique<Page>();
    }
    for_each_word(ids[0], count, [&](size_t page, size_t word, uint64_t bits) { (*pages_[page])[word] |= bits; });
    return count;
  }
  // Precondition of erase(): the ids are held.
  void erase(int32_t id) { (*pages_[page_of(id)])[word_of(id)] &= ~bit_of(id); }
  // Most ids are neighbours: ids that share a word are cleared in one access.
  void erase(std::span<const int32_t> ids) {
    while (!ids.empty()) {
      size_t count = run_length<-1>(ids);
      const int32_t lowest = count > 0 ? ids[count - 1] : ids[0];
      if (count == 0) count = run_length<1>(ids);
      if (count > 0) {
        for_each_word(lowest, count, [&](size_t page, size_t word, uint64_t bits) { (*pages_[page])[word] &= ~bits; });
      } else {
        count = erase_word(ids);
      }
      ids = ids.subspan(count);
    }
  }

  // Frees pages without an id, except reserved pages.
  void shrink() noexcept {
    for (auto& page : std::span(pages_).subspan(num_reserved_)) {
      if (page != nullptr && std::all_of(page->begin(), page->end(), [](uint64_t word) { return word == 0; })) {
        page.reset();
      }
    }
  }

  [[nodiscard]] int64_t count() const {
    int64_t held = 0;
    for (const auto& page : pages_) {
      if (page == nullptr) continue;
      for (const uint64_t word : *page) held += std::popcount(word);
    }
    return held;
  }
  // Appends every id in ascending order; `out` has room for count() more.
  void list(std::vector<int32_t>& out) const {
    for (size_t page = 0; page < pages_.size(); ++page) {
      if (pages_[page] == nullptr) continue;
      for (size_t i = 0; i < pages_[page]->size(); ++i) {
        for (uint64_t word = (*pages_[page])[i]; word != 0; word &= word - 1) {
          out.push_back(static_cast<int32_t>(page << 15 | i << 6 | static_cast<size_t>(std::countr_zero(word))));
        }
      }
    }
  }
  [[nodiscard]] size_t nbytes() const {
    size_t total = pages_.capacity() * sizeof(pages_[0]);
    for (const auto& page : pages_) total += page != nullptr ? sizeof(Page) : 0;
    return total;
  }

 private:
  using Page = std::array<uint64_t, 512>;
  static constexpr size_t kRun = 32;  // ids that are compared at once, in vectors

  // The number of ids from the front that differ by `step` (1 or -1), in multiples of kRun.
  template <int32_t step>
  [[nodiscard]] static size_t run_length(std::span<const int32_t> ids) {
    size_t count = 0;
    for (; count + kRun <= ids.size(); count += kRun) {
      const int32_t* const part = ids.data() + count;
      const int64_t first = ids[0] + step * static_cast<int64_t>(count);
      if (part[kRun - 1] != first + step * static_cast<int64_t>(kRun - 1)) break;
      uint32_t different = 0;
      for (uint32_t i = 0; i < kRun; ++i) {
        different |= static_cast<uint32_t>(part[i]) ^ (static_cast<uint32_t>(first) + static_cast<uint32_t>(step) * i);
      }
      if (different != 0) break;
    }
    return count;
  }
  // Calls visit(page, word, bits) for the words that have the ids [first, first + count).
  template <typename Visit>
  static void for_each_word(int32_t first, size_t count, Visit visit) {
    const int64_t end = int64_t{first} + static_cast<int64_t>(count);
    for (int64_t id = first; id < end;) {
      const int64_t next = std::min(end, (id | 63) + 1);
      const auto at = static_cast<int32_t>(id);
      visit(page_of(at), word_of(at), ~uint64_t{0} >> (64 - (next - id)) << (id & 63));
      id = next;
    }
  }
  // Erases the ids from the front that share a word; returns their number.
  size_t erase_word(std::span<const int32_t> ids) {
    const int32_t first = ids[0];
    uint64_t bits = 0;
    size_t count = 0;
    for (; count < ids.size() && (ids[count] >> 6) == (first >> 6); ++count) bits |= bit_of(ids[count]);
    (*pages_[page_of(first)])[word_of(first)] &= ~bits;
    return count;
  }

  [[nodiscard]] static size_t page_of(int32_t id) { return static_cast<uint32_t>(id) >> 15; }
  [[nodiscard]] static size_t word_of(int32_t id) { return (static_cast<uint32_t>(id) >> 6) & 511; }
  [[nodiscard]] static uint64_t bit_of(int32_t id) { return uint64_t{1} << (id & 63); }

  std::vector<std::unique_ptr<Page>> pages_;
  size_t num_reserved_ = 0;
};

}  // namespace pagecore::radix
