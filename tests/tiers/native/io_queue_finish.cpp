// cancel() and close() while a thread of the queue is in finish() of a job, which may change the job's transfers: they
// must leave the job alone.
#include <semaphore>

#include "pagecore/tiers/disk/slab_table.hpp"
#include "tests/tiers/native/files.hpp"

using namespace pagecore;
using namespace pagecore::test;
using namespace pagecore::tiers;

namespace {

constexpr Slot kGatedSlots = 40;  // in two units of the table
constexpr size_t kGatedBytes = 4096;
constexpr int64_t kGatedTable = 8192, kGatedData = kGatedTable + 2 * 4096;

// A write of the table reports that it began, and waits.
struct Gate {
  std::binary_semaphore began{0}, open{0};

  static Gate& only() {
    static Gate gate;
    return gate;
  }
};

int64_t write_at_the_gate(int, const iovec* parts, int count, int64_t offset) {
  Gate::only().began.release();
  Gate::only().open.acquire();
  return transfer(true, parts, count, offset);
}

const FileOps kGatedOps{kMemoryOps.read, write_at_the_gate};

// A queue of one thread, which is in finish() of a removal of one slot of each unit.
class Finishing {
 public:
  IoQueue queue{1, kMemoryOps};

  Finishing() {
    MemoryFile::only().reset(static_cast<size_t>(kGatedData) + kGatedSlots * kGatedBytes);
    auto job = std::make_unique<EraseJob>(1, std::vector<EraseJob::Place>{{table_.get(), 0}, {table_.get(), 39}},
                                          std::vector{table_});
    job_ = job.get();
    queue.submit(std::move(job));
    Gate::only().began.acquire();
  }

  // finish() has given the job its transfers, and none has ended yet.
  void check_untouched() const {
    PC_CHECK(job_->transfers.size() == 2, job_->transfers.size());
    for (const Transfer& each : job_->transfers) PC_CHECK(each.error == -1, "changed to ", each.error);
  }

  // Lets both writes of the job go on.
  void resume() {
    Gate::only().open.release();
    Gate::only().began.acquire();
    Gate::only().open.release();
  }

  void check_ended(std::vector<std::unique_ptr<Job>> ended) const {
    PC_CHECK(ended.size() == 1 && ended[0].get() == job_, ended.size());
    for (const Transfer& each : job_->transfers) PC_CHECK(each.error == 0, each.error);
  }

  // A load of the table's file, which takes one transfer.
  [[nodiscard]] std::unique_ptr<Job> load(Ticket ticket, const Payload& memory) const {
    return std::make_unique<Job>(ticket, Direction::Load,
                                 std::vector<Transfer>{{3, kGatedData, memory.data(), kGatedBytes, 0}});
  }

 private:
  std::shared_ptr<SlabTable> table_ = std::make_shared<SlabTable>(3, kGatedOps, std::vector<uint8_t>(64, 7),
                                                                  kGatedSlots, kGatedBytes, kGatedTable, kGatedData);
  Job* job_;
};

}  // namespace

PC_TEST(cancel_leaves_a_job_that_is_being_finished_alone) {
  Finishing job;
  job.queue.cancel(1);
  job.queue.cancel(1);
  job.check_untouched();
  job.queue.check_invariants();
  PC_CHECK(job.queue.num_pending() == 1 && !job.queue.drain(0), job.queue.num_pending());
  job.resume();
  PC_CHECK(job.queue.drain(10), "the removal has not ended");
  job.check_ended(job.queue.poll());

  // The queue still runs other jobs, and cancels those that wait.
  const Payload memory(kGatedBytes);
  job.queue.submit(job.load(2, memory));
  PC_CHECK(job.queue.drain(10) && job.queue.poll().size() == 1, "the load has not ended");
  job.queue.check_invariants();
}

PC_TEST(cancel_ends_jobs_that_wait_while_another_is_being_finished) {
  Finishing job;
  const Payload memory(kGatedBytes);
  job.queue.submit(job.load(2, memory));
  job.queue.cancel(1);
  job.queue.cancel(2);
  job.check_untouched();
  job.queue.check_invariants();
  job.resume();
  PC_CHECK(job.queue.drain(10), "a job has not ended");
  const auto ended = job.queue.poll();
  PC_CHECK(ended.size() == 2 && ended[0]->ticket == 1 && ended[1]->ticket == 2, ended.size());
  PC_CHECK(ended[0]->transfers[0].error == 0 && ended[1]->transfers[0].error == ECANCELED, "other results");
}

PC_TEST(close_leaves_a_job_that_is_being_finished_alone) {
  Finishing job;
  const Payload memory(kGatedBytes);
  std::thread closing([&] { job.queue.close(); });
  // close() refuses jobs and cancels those that wait while it holds the lock: once one is refused, all are cancelled.
  for (Ticket ticket = 2;; ++ticket) {
    try {
      job.queue.submit(job.load(ticket, memory));
    } catch (const Error& error) {
      PC_CHECK(error.kind() == ErrorKind::UnsupportedOption, error.what());
      break;
    }
    job.queue.cancel(ticket);
    std::this_thread::yield();
  }
  job.check_untouched();
  job.resume();
  closing.join();
  auto ended = job.queue.poll();
  for (size_t i = 1; i < ended.size(); ++i) PC_CHECK(ended[i]->transfers[0].error == ECANCELED, "a load ran");
  ended.resize(1);
  job.check_ended(std::move(ended));
}
