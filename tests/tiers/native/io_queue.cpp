// The I/O queue under concurrent submission, cancellation and faults: each job ends once, and a load that succeeds has
// the bytes that a store wrote.
#include "pagecore/tiers/disk/io_queue.hpp"

#include <poll.h>

#include <map>
#include <set>

#include "pagecore/tiers/disk/slab_table.hpp"
#include "tests/tiers/native/files.hpp"

using namespace pagecore;
using namespace pagecore::test;
using namespace pagecore::tiers;

namespace {

constexpr Slot kSlots = 96;
constexpr size_t kBytes = 5000;
constexpr int64_t kTable = 8192, kData = kTable + 3 * 4096;
constexpr size_t kFileBytes = static_cast<size_t>(kData) + kSlots * 8192;

ContentKey key_of(uint64_t number) {
  ContentKey key{};
  std::memcpy(key.data(), &number, sizeof(number));
  return key;
}

std::shared_ptr<SlabTable> new_table() {
  static const std::vector<uint8_t> identity(64, 7);
  return std::make_shared<SlabTable>(3, kMemoryOps, identity, kSlots, kBytes, kTable, kData);
}

// One thread's slots of the table: it alone stores and loads them, so that it knows what they hold.
class Owner {
 public:
  Owner(IoQueue& queue, std::shared_ptr<SlabTable> table, int who, uint64_t seed)
      : queue_(queue), table_(std::move(table)), who_(who), random_(seed) {}

  // Submits a batch of stores, loads or removals of some of the owner's slots and cancels it now and then.
  Ticket submit(int step) {
    const Ticket ticket = static_cast<Ticket>(who_) * 1000000 + static_cast<Ticket>(step) + 1;
    is_erase_ = !held_.empty() && random_.one_in(5);
    const bool is_load = !is_erase_ && !held_.empty() && random_.one_in(2);
    batch_.clear();
    if (is_erase_) {
      erase(ticket);
      return ticket;
    }
    std::vector<Transfer> transfers;
    std::vector<StoreJob::Place> places;
    for (Slot slot = static_cast<Slot>(who_); slot < kSlots; slot += 4) {
      if (!random_.one_in(3) || (is_load && held_.count(slot) == 0)) continue;
      const uint64_t number = is_load ? held_[slot] : random_.bits();
      batch_.push_back({slot, number, Payload(kBytes)});
      if (!is_load) {
        batch_.back().memory.fill(number);
        gone_.erase(slot);
      }
      transfers.push_back(table_->transfer(slot, key_of(number), batch_.back().memory.data(), kBytes, is_load));
      places.push_back({table_.get(), slot, key_of(number), ticket});
    }
    is_load_ = is_load;
    if (is_load) {
      queue_.submit(std::make_unique<LoadJob>(ticket, std::move(transfers), std::vector{table_}));
    } else {
      queue_.submit(std::make_unique<StoreJob>(ticket, std::move(transfers), std::move(places), std::vector{table_}));
    }
    if (random_.one_in(4)) queue_.cancel(ticket);
    if (random_.one_in(4)) queue_.cancel(random_.bits() % 2000000);
    return ticket;
  }

  // Checks the results of the batch.
  void end(const Job& job) {
    PC_CHECK(job.transfers.size() == batch_.size(), job.transfers.size());
    for (size_t i = 0; i < batch_.size(); ++i) {
      const int error = job.transfers[i].error;
      const Item& item = batch_[i];
      PC_CHECK(error >= 0, "a transfer has not ended");
      PC_CHECK(item.memory.rest_is_untouched(), "bytes after the payload were written");
      if (is_erase_) {
        held_.erase(item.slot);
        if (error == 0) gone_.insert(item.slot);
      } else if (is_load_) {
        PC_CHECK(error != 0 || item.memory.holds(item.number), "a load brought other bytes");
      } else if (error == 0) {
        held_[item.slot] = item.number;
      } else {
        held_.erase(item.slot);
      }
    }
  }
  [[nodiscard]] const std::map<Slot, uint64_t>& held() const { return held_; }
  // Slots that were erased, and to which nothing was written afterwards.
  [[nodiscard]] const std::set<Slot>& gone() const { return gone_; }

 private:
  struct Item {
    Slot slot;
    uint64_t number;
    Payload memory;
  };

  void erase(Ticket ticket) {
    std::vector<EraseJob::Place> places;
    for (const auto& [slot, number] : held_) {
      if (random_.one_in(2)) continue;
      batch_.push_back({slot, number, Payload(kBytes)});
      places.push_back({table_.get(), slot});
    }
    queue_.submit(std::make_unique<EraseJob>(ticket, std::move(places), std::vector{table_}));
    if (random_.one_in(4)) queue_.cancel(ticket);
  }

  IoQueue& queue_;
  std::shared_ptr<SlabTable> table_;
  const int who_;
  Random random_;
  std::vector<Item> batch_;
  bool is_load_ = false, is_erase_ = false;
  std::map<Slot, uint64_t> held_;
  std::set<Slot> gone_;
};

// Ended jobs by ticket, collected by whichever thread polls.
class Mail {
 public:
  explicit Mail(IoQueue& queue) : queue_(queue) {}

  std::unique_ptr<Job> wait(Ticket ticket) {
    while (true) {
      {
        const std::lock_guard lock(mutex_);
        for (std::unique_ptr<Job>& job : queue_.poll()) {
          PC_CHECK(jobs_.emplace(job->ticket, std::move(job)).second, "a job ended twice");
        }
        if (const auto found = jobs_.find(ticket); found != jobs_.end()) {
          std::unique_ptr<Job> job = std::move(found->second);
          jobs_.erase(found);
          return job;
        }
      }
      pollfd event{queue_.fileno(), POLLIN, 0};
      ::poll(&event, 1, 1);
    }
  }

 private:
  IoQueue& queue_;
  std::mutex mutex_;
  std::map<Ticket, std::unique_ptr<Job>> jobs_;
};

}  // namespace

PC_TEST(every_job_of_many_threads_ends_once_with_the_right_bytes) {
  rounds(6, [](Random& random) {
    MemoryFile::only().reset(kFileBytes);
    IoQueue queue(random.between(1, 6), kMemoryOps);
    const auto table = new_table();
    Mail mail(queue);
    MemoryFile::only().faults_in_1000 = random.pick({0, 30, 300});
    const std::vector<uint64_t> seeds = random.seeds(4);
    std::vector<Owner> owners;
    for (int who = 0; who < 4; ++who) owners.emplace_back(queue, table, who, seeds[static_cast<size_t>(who)]);
    in_threads(4, [&](int who) {
      Owner& owner = owners[static_cast<size_t>(who)];
      for (int step = 0; step < 30; ++step) {
        const Ticket ticket = owner.submit(step);
        owner.end(*mail.wait(ticket));
        if (who == 0 && step % 8 == 0) queue.check_invariants();
        if (who == 1 && step % 8 == 0) table->check_invariants();
      }
    });
    PC_CHECK(queue.drain(10), "jobs are pending");
    table->check_invariants();
    // A reopened table has what every owner stored.
    MemoryFile::only().faults_in_1000 = 0;
    const auto reopened = new_table();
    PC_CHECK(reopened->open() == 0, "the table cannot be read");
    std::map<Slot, ContentKey> found;
    for (const Entry& entry : reopened->used()) found[entry.slot] = entry.key;
    for (const Owner& owner : owners) {
      for (const Slot slot : owner.gone()) PC_CHECK(found.count(slot) == 0, "slot ", slot, " was erased");
      for (const auto& [slot, number] : owner.held()) PC_CHECK(found[slot] == key_of(number), "slot ", slot);
    }
  });
}

PC_TEST(closing_ends_every_job) {
  rounds(20, [](Random& random) {
    MemoryFile::only().reset(kFileBytes);
    const auto table = new_table();
    std::vector<Payload> memory;
    IoQueue queue(random.between(1, 4), kMemoryOps);
    const int64_t jobs = random.between(0, 12);
    for (int64_t job = 0; job < jobs; ++job) {
      std::vector<Transfer> transfers;
      std::vector<StoreJob::Place> places;
      const int64_t count = random.below(8);
      for (int64_t i = 0; i < count; ++i) {
        const auto slot = static_cast<Slot>(job * 8 + i);
        memory.emplace_back(kBytes);
        transfers.push_back(table->transfer(slot, key_of(slot), memory.back().data(), kBytes, false));
        places.push_back({table.get(), slot, key_of(slot), 1});
      }
      queue.submit(std::make_unique<StoreJob>(static_cast<Ticket>(job), std::move(transfers), std::move(places),
                                              std::vector{table}));
    }
    if (random.one_in(2)) queue.cancel(0);
    queue.close();
    queue.close();
    PC_CHECK(queue.num_pending() == 0 && queue.drain(0), queue.num_pending());
    PC_CHECK(queue.poll().size() == static_cast<size_t>(jobs), "a job has not ended");
    PC_CHECK(queue.fileno() == -1, queue.fileno());
    PC_REFUSES(UnsupportedOption,
               queue.submit(std::make_unique<LoadJob>(99, std::vector<Transfer>{}, std::vector{table})));
    table->check_invariants();
  });
}

PC_TEST(invalid_jobs_and_queues_are_refused) {
  MemoryFile::only().reset(kFileBytes);
  PC_REFUSES(ShapeError, IoQueue(0, kMemoryOps));
  PC_REFUSES(ShapeError, IoQueue(257, kMemoryOps));
  PC_REFUSES(ShapeError, IoQueue(1, FileOps{nullptr, nullptr}));
  const auto table = new_table();
  const Payload memory(kBytes);
  PC_REFUSES(InvalidBlock, static_cast<void>(table->transfer(kSlots, key_of(0), memory.data(), kBytes, false)));
  PC_REFUSES(ShapeError, static_cast<void>(table->transfer(0, key_of(0), memory.data(), kBytes + 1, false)));
  IoQueue queue(2, kMemoryOps);
  const auto job = [&](char* address) {
    std::vector<Transfer> transfers{table->transfer(0, key_of(0), address, kBytes, false)};
    return std::make_unique<StoreJob>(7, std::move(transfers),
                                      std::vector{StoreJob::Place{table.get(), 0, key_of(0), 1}}, std::vector{table});
  };
  PC_REFUSES(ShapeError, queue.submit(job(memory.data() + 512)));
  PC_REFUSES(ShapeError, queue.submit(job(nullptr)));
  PC_CHECK(queue.num_pending() == 0, queue.num_pending());
  queue.submit(job(memory.data()));
  PC_CHECK(queue.drain(-1), "drain");
  queue.check_invariants();
  std::vector<std::unique_ptr<Job>> ended = queue.poll();
  PC_CHECK(ended.size() == 1, "one job");
  queue.put_back(ended);
  queue.check_invariants();
  PC_CHECK(ended.empty() && queue.poll().size() == 1, "the job that was put back");
  PC_REFUSES(ShapeError, SlabTable(3, kMemoryOps, {}, 0, kBytes, 0, 4096));
  PC_REFUSES(ShapeError, SlabTable(3, kMemoryOps, {}, 1, kBytes, 100, 4096));
}
