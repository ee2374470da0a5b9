// Threads that read and write the payloads of batches.
//
// A job is one batch: transfers of one direction, each a payload in memory and its slot in a file. Loads start before
// stores that wait. A job ends once, after all of its transfers have ended: the thread that ends the last one calls
// finish(), puts the job into the list that poll() returns, and signals the eventfd.
//
// I1: a job is in exactly one place: submitted (jobs) or ended, until poll() returns it.
// I2: job.left counts its transfers that are waiting or running; waiting ones are [next, size) of a queued job.
// I3: the memory of a transfer is touched only while its job is submitted.
// Only the constructor, submit() and poll() allocate, before they change anything: lists of jobs are links in the jobs.
// States of a transfer: waiting -> running -> ended with 0 or an errno; waiting -> ECANCELED (cancel, close).
//
// Payloads are read and written in units of kUnit bytes for O_DIRECT: what remains of the last unit passes through a
// buffer of the thread, so that no byte after the payload is touched.
//
// Threads: every call takes mutex_. In a child of fork() the threads do not exist and the mutex may be locked: every
// call is refused or does nothing, and the destructor leaves the state alone.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "pagecore/tiers/disk/file_ops.hpp"

namespace pagecore::tiers {

using Ticket = uint64_t;

inline constexpr size_t kUnit = 4096;

[[nodiscard]] constexpr size_t whole_units(size_t nbytes) { return (nbytes + kUnit - 1) / kUnit * kUnit; }

struct Transfer {
  int fd;
  int64_t offset;  // of the slot, a multiple of kUnit
  void* address;   // of the payload, a multiple of kUnit
  size_t nbytes;
  uint64_t seed;     // of the sum
  uint64_t sum = 0;  // expected of a load; the result of a store
  int error = -1;    // after the end: 0, an errno, ECANCELED, or EBADMSG if the sum of a load differs
};

enum class Direction : uint8_t { Load, Store };

class Job {
 public:
  Job(Ticket ticket, Direction direction, std::vector<Transfer> transfers)
      : transfers(std::move(transfers)), ticket(ticket), direction(direction) {}
  virtual ~Job() = default;
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Called once, after every transfer has ended, without a lock.
  virtual void finish() noexcept {}

  std::vector<Transfer> transfers;
  const Ticket ticket;
  const Direction direction;

 private:
  friend class IoQueue;
  size_t next = 0;
  size_t left = 0;
  Job* following = nullptr;  // in the list of the queue that has the job
};

class IoQueue {
 public:
  // Throws ShapeError for a number of threads outside 1 .. 256, DeviceError if the system has no eventfd or thread
  // left.
  IoQueue(int64_t num_threads, const FileOps& ops);
  ~IoQueue();
  IoQueue(const IoQueue&) = delete;
  IoQueue& operator=(const IoQueue&) = delete;

  // Takes the job; throws UnsupportedOption after close(), in a child of fork(), and for a ticket that is pending.
  void submit(std::unique_ptr<Job> job);
  // Ends the transfers of a job that have not started with ECANCELED; unknown tickets are ignored.
  void cancel(Ticket ticket) noexcept;
  // Returns the jobs that ended since the last call, in the order of their ends.
  [[nodiscard]] std::vector<std::unique_ptr<Job>> poll();
  // Takes back jobs of a poll() whose caller has no memory for the results: the next poll() returns them first. Those
  // that the caller has taken are null.
  void put_back(std::vector<std::unique_ptr<Job>>& jobs) noexcept;
  // Waits until nothing is pending; false if `seconds` pass first. Negative seconds: no limit.
  [[nodiscard]] bool drain(double seconds);
  // Cancels all jobs, waits for running transfers, ends the threads and closes the eventfd. poll() still returns the
  // last jobs.
  void close() noexcept;
  // Makes the eventfd readable until the next poll().
  void signal() noexcept;
  [[nodiscard]] int fileno() const noexcept;
  [[nodiscard]] int64_t num_pending() const;
  // True in a child of the process that made the queue.
  [[nodiscard]] bool is_foreign() const noexcept;
  void check_invariants() const;

 private:
  class JobList;
  struct State;

  static void work(State& state, char* rest) noexcept;
  static void end(State& state, std::unique_lock<std::mutex>& lock, Job& job) noexcept;
  static void cancel_waiting(State& state, Job& job) noexcept;

  std::unique_ptr<State> state_;
};

}  // namespace pagecore::tiers
