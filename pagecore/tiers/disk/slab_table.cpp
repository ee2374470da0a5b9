#include "pagecore/tiers/disk/slab_table.hpp"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <tuple>

#include "pagecore/native/checks.hpp"

namespace pagecore::tiers {
namespace {

constexpr size_t kReadBytes = size_t{8} << 20;
constexpr Slot kEntriesPerUnit = static_cast<Slot>(kUnit / sizeof(Entry));

Entry* allocated(Slot num_slots) {
  const size_t nbytes = whole_units(num_slots * sizeof(Entry));
  void* const memory = std::aligned_alloc(kUnit, nbytes);
  PC_EXPECTS(memory != nullptr, NotEnoughMemory, "no memory for a table of ", num_slots, " slots, ", nbytes,
             " bytes; use a smaller max_bytes");
  std::memset(memory, 0, nbytes);
  return static_cast<Entry*>(memory);
}

}  // namespace

SlabTable::SlabTable(int fd, const FileOps& ops, std::span<const uint8_t> identity, Slot num_slots,
                     uint64_t payload_bytes, int64_t table, int64_t data)
    : fd_(fd),
      ops_(ops),
      seed_(xxh3_64(identity.data(), identity.size(), 0)),
      num_slots_(num_slots),
      payload_bytes_(payload_bytes),
      table_(table),
      data_(data) {
  PC_EXPECTS(num_slots >= 1, ShapeError, "a slab has no slots; use 1 or more");
  PC_EXPECTS(table % static_cast<int64_t>(kUnit) == 0 && data % static_cast<int64_t>(kUnit) == 0, ShapeError,
             "a table at ", table, " and slots at ", data, "; use multiples of ", kUnit);
  entries_.reset(allocated(num_slots));
  stale_.resize(unit_of(num_slots - 1) + 1);
}

uint64_t SlabTable::sum_of(const Entry& entry, Slot slot) const noexcept {
  return xxh3_64(&entry, offsetof(Entry, sum), seed_ + slot);
}

bool SlabTable::is_valid(const Entry& entry, Slot slot) const noexcept {
  return entry.flags == kUsed && entry.slot == slot && entry.nbytes == payload_bytes_ &&
         entry.sum == sum_of(entry, slot);
}

int SlabTable::open() {
  const std::lock_guard lock(mutex_);
  char* const start = reinterpret_cast<char*>(entries_.get());
  const size_t nbytes = whole_units(num_slots_ * sizeof(Entry));
  for (size_t at = 0; at < nbytes; at += kReadBytes) {
    iovec parts[2] = {{start + at, std::min(kReadBytes, nbytes - at)}, {nullptr, 0}};
    if (const int error = move_all(ops_, false, fd_, parts, table_ + static_cast<int64_t>(at)); error != 0) {
      std::memset(start, 0, nbytes);
      return error;
    }
  }
  for (Slot slot = 0; slot < nbytes / sizeof(Entry); ++slot) {
    if (slot >= num_slots_ || !is_valid(entries_[slot], slot)) std::memset(&entries_[slot], 0, sizeof(Entry));
  }
  return 0;
}

std::vector<Entry> SlabTable::used() const {
  const std::lock_guard lock(mutex_);
  std::vector<Entry> found;
  std::copy_if(entries_.get(), entries_.get() + num_slots_, std::back_inserter(found),
               [](const Entry& entry) { return entry.flags == kUsed; });
  return found;
}

Transfer SlabTable::transfer(Slot slot, const ContentKey& key, void* address, uint64_t nbytes, bool is_load) const {
  PC_EXPECTS(slot < num_slots_, InvalidBlock, "slot ", slot, " is outside of the slab; it has ", num_slots_);
  PC_EXPECTS(nbytes == payload_bytes_, ShapeError, "a piece has ", nbytes, " bytes; entries of this lane have ",
             payload_bytes_, ": the layouts of host and disk must be equal");
  const int64_t offset = data_ + static_cast<int64_t>(slot * whole_units(payload_bytes_));
  Transfer made{fd_, offset, address, nbytes, seed_of(key.data())};
  if (is_load) {
    const std::lock_guard lock(mutex_);
    const Entry& entry = entries_[slot];
    PC_ASSERT(entry.flags == kUsed && entry.key == key);
    made.sum = entry.payload_sum;
  }
  return made;
}

int SlabTable::publish(std::span<const Entry> entries) noexcept {
  if (entries.empty()) return 0;
  const std::lock_guard lock(mutex_);
  for (const Entry& given : entries) {
    Entry& entry = entries_[given.slot];
    entry = given;
    entry.flags = kUsed;
    entry.nbytes = payload_bytes_;
    entry.sum = sum_of(entry, entry.slot);
  }
  const int error = write_unit(unit_of(entries.front().slot));
  if (error != 0) {
    for (const Entry& given : entries) std::memset(&entries_[given.slot], 0, sizeof(Entry));
  }
  return error;
}

int SlabTable::erase(std::span<const Slot> slots) noexcept {
  if (slots.empty()) return 0;
  const std::lock_guard lock(mutex_);
  for (const Slot slot : slots) std::memset(&entries_[slot], 0, sizeof(Entry));
  return write_unit(unit_of(slots.front()));
}

// The caller holds mutex_.
int SlabTable::write_unit(Slot unit) noexcept {
  iovec parts[2] = {{&entries_[unit * kEntriesPerUnit], kUnit}, {nullptr, 0}};
  const int error = move_all(ops_, true, fd_, parts, table_ + static_cast<int64_t>(unit * kUnit));
  stale_[unit] = error != 0;
  return error;
}

int SlabTable::flush() noexcept {
  const std::lock_guard lock(mutex_);
  int first = 0;
  for (Slot unit = 0; unit < stale_.size(); ++unit) {
    const int error = stale_[unit] != 0 ? write_unit(unit) : 0;
    if (first == 0) first = error;
  }
  return first;
}

void SlabTable::clear(Slot slot) noexcept {
  const std::lock_guard lock(mutex_);
  std::memset(&entries_[slot], 0, sizeof(Entry));
  stale_[unit_of(slot)] = 1;
}

void SlabTable::check_invariants() const {
  const std::lock_guard lock(mutex_);
  const Entry zeros{};
  for (Slot slot = 0; slot < num_slots_; ++slot) {
    PC_ASSERT(is_valid(entries_[slot], slot) || std::memcmp(&entries_[slot], &zeros, sizeof(Entry)) == 0);
  }
}

namespace {

// Calls visit(indices) for the places of each unit of a table; `order` has one element for each place.
template <typename Place, typename Visit>
void for_each_unit(const std::vector<Place>& places, std::vector<size_t>& order, Visit&& visit) {
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::tie(places[a].table, places[a].slot) < std::tie(places[b].table, places[b].slot);
  });
  const auto unit = [&](size_t i) {
    const Place& place = places[order[i]];
    return std::pair(place.table, SlabTable::unit_of(place.slot));
  };
  for (size_t begin = 0, end = 0; begin < order.size(); begin = end) {
    while (end < order.size() && unit(end) == unit(begin)) ++end;
    visit(std::span<const size_t>(order).subspan(begin, end - begin));
  }
}

}  // namespace

void StoreJob::finish() noexcept {
  for_each_unit(places_, order_, [&](std::span<const size_t> indices) {
    run_.clear();
    for (const size_t i : indices) {
      const Place& place = places_[i];
      const Transfer& transfer = transfers[i];
      if (transfer.error != 0) {
        place.table->clear(place.slot);
        continue;
      }
      Entry entry{};
      entry.key = place.key;
      entry.slot = place.slot;
      entry.sequence = place.sequence;
      entry.payload_sum = transfer.sum;
      entry.before = place.before;
      run_.push_back(entry);
    }
    const int error = places_[indices.front()].table->publish(run_);
    if (error == 0) return;
    for (const size_t i : indices) {
      if (transfers[i].error == 0) transfers[i].error = error;
    }
  });
}

void EraseJob::finish() noexcept {
  transfers.resize(places_.size());
  for_each_unit(places_, order_, [&](std::span<const size_t> indices) {
    run_.clear();
    for (const size_t i : indices) run_.push_back(places_[i].slot);
    const int error = places_[indices.front()].table->erase(run_);
    for (const size_t i : indices) transfers[i].error = error;
  });
}

}  // namespace pagecore::tiers
