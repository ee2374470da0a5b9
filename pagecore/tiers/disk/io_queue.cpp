#include "pagecore/tiers/disk/io_queue.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <new>
#include <system_error>

#include "pagecore/native/checks.hpp"
#include "pagecore/tiers/keys/xxh3.hpp"

namespace pagecore::tiers {
namespace {

// The rest of the last unit of a payload, one for each thread.
struct alignas(kUnit) Tail {
  char bytes[kUnit];
};

int run(const FileOps& ops, Direction direction, Transfer& transfer, char* tail) noexcept {
  const bool is_store = direction == Direction::Store;
  const size_t rest = transfer.nbytes % kUnit, body = transfer.nbytes - rest;
  char* const start = static_cast<char*>(transfer.address);
  iovec parts[2] = {{start, body}, {tail, rest == 0 ? 0 : kUnit}};
  if (is_store) {
    transfer.sum = xxh3_64(start, transfer.nbytes, transfer.seed);
    std::memcpy(tail, start + body, rest);
    std::memset(tail + rest, 0, kUnit - rest);
    return move_all(ops, true, transfer.fd, parts, transfer.offset);
  }
  const int error = move_all(ops, false, transfer.fd, parts, transfer.offset);
  if (error != 0) return error;
  std::memcpy(start + body, tail, rest);
  return xxh3_64(start, transfer.nbytes, transfer.seed) == transfer.sum ? 0 : EBADMSG;
}

// Blocks all signals of the calling thread, so that the threads that it starts handle none.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

// First in, first out; the links are in the jobs, so that nothing fails.
class IoQueue::JobList {
 public:
  JobList() = default;
  JobList(const JobList&) = delete;
  JobList& operator=(const JobList&) = delete;
  [[nodiscard]] bool empty() const noexcept { return first_ == nullptr; }
  [[nodiscard]] size_t size() const noexcept { return size_; }
  [[nodiscard]] Job& front() const noexcept { return *first_; }
  void push_front(Job& job) noexcept { insert(&first_, job); }
  void push_back(Job& job) noexcept { insert(end_, job); }
  void pop_front() noexcept { remove(*first_); }
  void remove(Job& job) noexcept {
    Job** link = &first_;
    while (*link != &job) link = &(*link)->following;
    *link = job.following;
    if (*link == nullptr) end_ = link;
    --size_;
  }
  template <class F>
  void for_each(F visit) const {
    for (const Job* job = first_; job != nullptr; job = job->following) visit(*job);
  }

 private:
  void insert(Job** link, Job& job) noexcept {
    job.following = *link;
    *link = &job;
    if (job.following == nullptr) end_ = &job.following;
    ++size_;
  }

  Job* first_ = nullptr;
  Job** end_ = &first_;  // the null link
  size_t size_ = 0;
};

struct IoQueue::State {
  State(const FileOps& ops, size_t num_threads)
      : ops(ops), owner(getpid()), tails(std::make_unique<Tail[]>(num_threads)) {
    threads.reserve(num_threads);
  }
  ~State() {
    while (!ended.empty()) {
      const std::unique_ptr<Job> job(&ended.front());
      ended.pop_front();
    }
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  const FileOps ops;
  const pid_t owner;
  std::atomic<int> event{-1};
  mutable std::mutex mutex;
  std::condition_variable has_work, is_idle;
  JobList loads, stores;  // with transfers that wait
  JobList unfinished;     // without transfers that run or wait; finish() has not been called
  JobList ended;          // owned
  std::unordered_map<Ticket, std::unique_ptr<Job>> jobs;
  const std::unique_ptr<Tail[]> tails;  // of the threads
  std::vector<std::thread> threads;
  bool is_closing = false, is_closed = false;
};

IoQueue::IoQueue(int64_t num_threads, const FileOps& ops) {
  PC_EXPECTS(num_threads >= 1 && num_threads <= 256, ShapeError, "threads is ", num_threads, "; use 1 to 256");
  PC_EXPECTS(ops.read != nullptr && ops.write != nullptr, ShapeError, "a table of file operations has no function");
  state_ = std::make_unique<State>(ops, static_cast<size_t>(num_threads));
  State& state = *state_;
  state.event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  PC_EXPECTS(state.event >= 0, DeviceError, "no eventfd: ", std::strerror(errno), "; raise the limit of open files");
  const SignalsBlocked blocked;
  try {
    for (int64_t i = 0; i < num_threads; ++i) {
      state.threads.emplace_back([&state, i] { work(state, state.tails[static_cast<size_t>(i)].bytes); });
    }
  } catch (const std::bad_alloc&) {
    close();
    throw;
  } catch (const std::system_error& error) {
    close();
    fail(ErrorKind::DeviceError, state.threads.size(), " of ", num_threads, " threads started: ", error.what(),
         "; use fewer threads, or raise the limit of processes");
  }
}

IoQueue::~IoQueue() {
  if (is_foreign()) {
    static_cast<void>(state_.release());  // its threads do not exist here, and others may have held its locks
    return;
  }
  close();
}

bool IoQueue::is_foreign() const noexcept { return state_->owner != getpid(); }

int IoQueue::fileno() const noexcept { return state_->event; }

void IoQueue::signal() noexcept {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(state_->event, &one, sizeof(one));  // fails only if it is set already
}

void IoQueue::submit(std::unique_ptr<Job> job) {
  PC_EXPECTS(!is_foreign(), UnsupportedOption,
             "the I/O queue belongs to another process, of which this one is a fork; open a store of its own");
  State& state = *state_;
  for (const Transfer& each : job->transfers) {
    PC_EXPECTS(each.nbytes > 0 && reinterpret_cast<uintptr_t>(each.address) % kUnit == 0 && each.address != nullptr,
               ShapeError, "a piece has address ", each.address, " and ", each.nbytes,
               " bytes; give memory at a multiple of ", kUnit, ", as HostPool has it");
  }
  const std::lock_guard lock(state.mutex);
  PC_EXPECTS(!state.is_closing, UnsupportedOption, "the I/O queue is closed; open another store");
  Job& added = *job;
  const Ticket ticket = added.ticket;
  const bool is_new = state.jobs.try_emplace(ticket, std::move(job)).second;
  PC_EXPECTS(is_new, UnsupportedOption, "ticket ", ticket, " is pending; number the batches");
  added.left = added.transfers.size();
  JobList& waiting = added.left == 0                      ? state.unfinished
                     : added.direction == Direction::Load ? state.loads
                                                          : state.stores;
  waiting.push_back(added);
  if (added.left > 1) {
    state.has_work.notify_all();
  } else {
    state.has_work.notify_one();
  }
}

void IoQueue::work(State& state, char* rest) noexcept {
  std::unique_lock lock(state.mutex);
  while (true) {
    state.has_work.wait(lock, [&] {
      return state.is_closing || !state.unfinished.empty() || !state.loads.empty() || !state.stores.empty();
    });
    if (!state.unfinished.empty()) {
      Job& job = state.unfinished.front();
      state.unfinished.pop_front();
      end(state, lock, job);
      continue;
    }
    JobList& waiting = state.loads.empty() ? state.stores : state.loads;
    if (waiting.empty()) return;  // closing
    Job& job = waiting.front();
    Transfer& transfer = job.transfers[job.next++];
    if (job.next == job.transfers.size()) waiting.pop_front();
    lock.unlock();
    transfer.error = run(state.ops, job.direction, transfer, rest);
    lock.lock();
    if (--job.left == 0) end(state, lock, job);
  }
}

// Called with the lock, which finish() runs without.
void IoQueue::end(State& state, std::unique_lock<std::mutex>& lock, Job& job) noexcept {
  lock.unlock();
  job.finish();
  lock.lock();
  const auto found = state.jobs.find(job.ticket);
  state.ended.push_back(*found->second.release());
  state.jobs.erase(found);
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(state.event, &one, sizeof(one));
  if (state.jobs.empty()) state.is_idle.notify_all();
}

void IoQueue::cancel_waiting(State& state, Job& job) noexcept {
  // With nothing left the job is being finished, without the lock: finish() may change the transfers.
  if (job.left == 0 || job.next == job.transfers.size()) return;
  (job.direction == Direction::Load ? state.loads : state.stores).remove(job);
  for (; job.next < job.transfers.size(); ++job.next) {
    job.transfers[job.next].error = ECANCELED;
    --job.left;
  }
  if (job.left > 0) return;  // the thread that ends the last one finishes the job
  state.unfinished.push_back(job);
  state.has_work.notify_one();
}

void IoQueue::cancel(Ticket ticket) noexcept {
  if (is_foreign()) return;
  State& state = *state_;
  const std::lock_guard lock(state.mutex);
  const auto found = state.jobs.find(ticket);
  if (found != state.jobs.end()) cancel_waiting(state, *found->second);
}

std::vector<std::unique_ptr<Job>> IoQueue::poll() {
  std::vector<std::unique_ptr<Job>> out;
  if (is_foreign()) return out;
  const std::lock_guard lock(state_->mutex);
  JobList& ended = state_->ended;
  out.reserve(ended.size());
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = read(state_->event, &count, sizeof(count));  // fails if nothing is signalled
  while (!ended.empty()) {
    out.emplace_back(&ended.front());
    ended.pop_front();
  }
  return out;
}

void IoQueue::put_back(std::vector<std::unique_ptr<Job>>& jobs) noexcept {
  const std::lock_guard lock(state_->mutex);
  for (; !jobs.empty(); jobs.pop_back()) {
    if (Job* const job = jobs.back().release()) state_->ended.push_front(*job);
  }
  signal();
}

bool IoQueue::drain(double seconds) {
  if (is_foreign()) return true;
  State& state = *state_;
  std::unique_lock lock(state.mutex);
  const auto done = [&] { return state.jobs.empty(); };
  // A wait of years is without a limit; a longer one would overflow the clock.
  if (seconds < 0 || !(seconds < 1e9)) {
    state.is_idle.wait(lock, done);
    return true;
  }
  return state.is_idle.wait_for(lock, std::chrono::duration<double>(seconds), done);
}

void IoQueue::close() noexcept {
  if (is_foreign()) return;
  State& state = *state_;
  {
    const std::lock_guard lock(state.mutex);
    if (state.is_closed) return;
    state.is_closed = true;
    state.is_closing = true;
    for (auto& [ticket, job] : state.jobs) cancel_waiting(state, *job);
    state.has_work.notify_all();
  }
  for (std::thread& thread : state.threads) thread.join();
  state.threads.clear();
  ::close(state.event.exchange(-1));
}

int64_t IoQueue::num_pending() const {
  if (is_foreign()) return 0;
  const std::lock_guard lock(state_->mutex);
  return static_cast<int64_t>(state_->jobs.size());
}

void IoQueue::check_invariants() const {
  if (is_foreign()) return;
  const State& state = *state_;
  const std::lock_guard lock(state.mutex);
  size_t queued = 0;
  for (const auto* waiting : {&state.loads, &state.stores, &state.unfinished}) {
    waiting->for_each([&](const Job& job) {
      const auto found = state.jobs.find(job.ticket);
      PC_ASSERT(found != state.jobs.end() && found->second.get() == &job);
      PC_ASSERT((waiting == &state.unfinished) == (job.next == job.transfers.size()));
      PC_ASSERT(job.left >= job.transfers.size() - job.next);
      ++queued;
    });
  }
  PC_ASSERT(queued <= state.jobs.size());
  state.ended.for_each([](const Job& job) {
    for (const Transfer& each : job.transfers) PC_ASSERT(each.error >= 0);
  });
}

}  // namespace pagecore::tiers
