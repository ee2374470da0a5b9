// The table of a slab: which key each slot holds, in memory and on disk.
//
// The file has 128 bytes for each slot. Memory holds a copy of all entries, from which whole units of kUnit bytes are
// written. Entries are written after their payloads, and nothing is synchronised with the disk: after a crash any of
// the 512-byte sectors written last may be old. A sector holds four whole entries, and an entry holds the sum of itself
// and of its payload, so that what does not belong together is recognised when it is read.
//
// I1: an entry of the copy is either zeros or valid: its sum fits its bytes, its slot and the slab.
// I2: the copy of a slot changes only in open(), publish(), erase() and clear().
// I3: a unit that is not stale has no valid entry in the file that the copy lacks, but for what a crash brings back.
// Threads: every call takes mutex_; publish() and erase() write while they hold it, so that units reach the file in the
// order of their contents.
#pragma once

#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "pagecore/tiers/disk/file_ops.hpp"
#include "pagecore/tiers/disk/io_queue.hpp"
#include "pagecore/tiers/keys/xxh3.hpp"

namespace pagecore::tiers {

using Slot = uint32_t;
using ContentKey = std::array<uint8_t, kKeyBytes>;

struct Entry {
  ContentKey key;
  uint8_t flags;  // kUsed, or 0
  uint8_t reserved[2];
  Slot slot;
  uint64_t nbytes;       // of the payload
  uint64_t sequence;     // number of the store; the larger one is newer
  uint64_t payload_sum;  // XXH3_64 of the payload, seeded by the key
  ContentKey before;     // of the entry before it in its prefix, or zeros
  uint8_t padding[55];
  uint64_t sum;  // XXH3_64 of the bytes before it, seeded by the slab and the slot
};
static_assert(sizeof(Entry) == 128);

inline constexpr uint8_t kUsed = 1;

class SlabTable {
 public:
  // `identity` is the digest of the slab: entries of another slab are invalid. `table` and `data` are the offsets of
  // the first entry and of the first slot, multiples of kUnit.
  SlabTable(int fd, const FileOps& ops, std::span<const uint8_t> identity, Slot num_slots, uint64_t payload_bytes,
            int64_t table, int64_t data);

  // Reads the table in one sequence of large reads; invalid entries become zeros. Returns 0 or an errno.
  [[nodiscard]] int open();
  // The slots in use, ascending.
  [[nodiscard]] std::vector<Entry> used() const;
  // A transfer of a payload of the slot; of a load it has the expected sum.
  [[nodiscard]] Transfer transfer(Slot slot, const ContentKey& key, void* address, uint64_t nbytes, bool is_load) const;
  // Writes entries of one unit of the table; every slot is in that unit. Returns 0, or an errno: then the slots are
  // zeros in the copy.
  [[nodiscard]] int publish(std::span<const Entry> entries) noexcept;
  // Forgets slots of one unit of the table, in the file too. Returns 0, or an errno: then the file may still have them.
  [[nodiscard]] int erase(std::span<const Slot> slots) noexcept;
  // Forgets a slot in the copy; the file follows when its unit is written, or in flush().
  void clear(Slot slot) noexcept;
  // Writes the units of which the file may have entries that the copy lacks. Returns 0, or the first errno.
  [[nodiscard]] int flush() noexcept;
  [[nodiscard]] static Slot unit_of(Slot slot) { return slot / static_cast<Slot>(kUnit / sizeof(Entry)); }
  [[nodiscard]] Slot num_slots() const { return num_slots_; }
  void check_invariants() const;

 private:
  struct Freed {
    void operator()(Entry* entries) const { std::free(entries); }
  };
  [[nodiscard]] int write_unit(Slot unit) noexcept;
  [[nodiscard]] uint64_t sum_of(const Entry& entry, Slot slot) const noexcept;
  [[nodiscard]] bool is_valid(const Entry& entry, Slot slot) const noexcept;

  const int fd_;
  const FileOps ops_;
  const uint64_t seed_;
  const Slot num_slots_;
  const uint64_t payload_bytes_;
  const int64_t table_, data_;
  mutable std::mutex mutex_;
  std::unique_ptr<Entry[], Freed> entries_;
  std::vector<uint8_t> stale_;  // of each unit
};

// A batch of stores: its finish() writes the entries of the payloads that were written.
class StoreJob : public Job {
 public:
  struct Place {
    SlabTable* table;
    Slot slot;
    ContentKey key;
    uint64_t sequence;
    ContentKey before{};  // of the entry before it in its prefix
  };
  // `tables` keeps the tables alive.
  StoreJob(Ticket ticket, std::vector<Transfer> transfers, std::vector<Place> places,
           std::vector<std::shared_ptr<SlabTable>> tables)
      : Job(ticket, Direction::Store, std::move(transfers)), places_(std::move(places)), tables_(std::move(tables)) {
    order_.resize(places_.size());  // finish() allocates nothing
    run_.reserve(kUnit / sizeof(Entry));
  }
  void finish() noexcept override;

 private:
  std::vector<Place> places_;
  std::vector<std::shared_ptr<SlabTable>> tables_;
  std::vector<size_t> order_;
  std::vector<Entry> run_;
};

// A batch of removals, which moves no payload: its finish() forgets the entries, and gives it a transfer for each with
// the result.
class EraseJob : public Job {
 public:
  struct Place {
    SlabTable* table;
    Slot slot;
  };
  // `tables` keeps the tables alive.
  EraseJob(Ticket ticket, std::vector<Place> places, std::vector<std::shared_ptr<SlabTable>> tables)
      : Job(ticket, Direction::Store, {}), places_(std::move(places)), tables_(std::move(tables)) {
    transfers.reserve(places_.size());  // finish() allocates nothing
    order_.resize(places_.size());
    run_.reserve(places_.size());
  }
  void finish() noexcept override;

 private:
  std::vector<Place> places_;
  std::vector<std::shared_ptr<SlabTable>> tables_;
  std::vector<size_t> order_;
  std::vector<Slot> run_;
};

// A batch of loads; keeps the tables alive.
class LoadJob : public Job {
 public:
  LoadJob(Ticket ticket, std::vector<Transfer> transfers, std::vector<std::shared_ptr<SlabTable>> tables)
      : Job(ticket, Direction::Load, std::move(transfers)), tables_(std::move(tables)) {}

 private:
  std::vector<std::shared_ptr<SlabTable>> tables_;
};

}  // namespace pagecore::tiers
