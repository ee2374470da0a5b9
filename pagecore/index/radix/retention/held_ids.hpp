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
  // Precondition of erase(): the ids are held.
  void erase(int32_t id) { (*pages_[page_of(id)])[word_of(id)] &= ~bit_of(id); }
  // Most ids are neighbours: ids that share a word are cleared in one access.
  void erase(std::span<const int32_t> ids) {
    for (size_t i = 0; i < ids.size();) {
      const int32_t first = ids[i];
      uint64_t bits = 0;
      for (; i < ids.size() && (ids[i] >> 6) == (first >> 6); ++i) bits |= bit_of(ids[i]);
      (*pages_[page_of(first)])[word_of(first)] &= ~bits;
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

  [[nodiscard]] static size_t page_of(int32_t id) { return static_cast<uint32_t>(id) >> 15; }
  [[nodiscard]] static size_t word_of(int32_t id) { return (static_cast<uint32_t>(id) >> 6) & 511; }
  [[nodiscard]] static uint64_t bit_of(int32_t id) { return uint64_t{1} << (id & 63); }

  std::vector<std::unique_ptr<Page>> pages_;
  size_t num_reserved_ = 0;
};

}  // namespace pagecore::radix
