#include "pagecore/ops/cpu/threads.hpp"

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <csignal>
#include <cstdio>

namespace pagecore::cpu {
namespace {

using Word = std::atomic<uint32_t>;

// Sleeps until woken, unless the word has changed from `seen` before; may also return for no reason.
void sleep_on(Word& word, uint32_t seen) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
}

void wake(Word& word, uint32_t count) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, count, nullptr, nullptr, 0);
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Whether `condition` holds within the time that sleeping and waking would take: calls follow each other closely.
template <typename Condition>
bool spin_until(Condition&& condition) {
  constexpr std::chrono::microseconds kSpin{20};
  constexpr int kLooksBetweenClocks = 16;
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kLooksBetweenClocks; ++i) {
      if (condition()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// The threads, and the one call that has them.
//
// state_ is (seats << 16 | working): how many more threads the call takes, and how many it has beside the caller.
//
//   0 -> open (seats > 0) -> closed (seats == 0, working > 0) -> 0
//
// I1: taken_ is held by the one caller from before the state leaves 0 until it is 0 again.
// I2: job_ is written in state 0 alone; a thread reads it between taking a seat and leaving, so while state_ is not 0.
// I3: the seats of a call have the numbers 1 .. num_threads - 1, each taken once; the caller is 0.
//
// A call closes as soon as its units are claimed and waits only for threads that have joined, so a thread that wakes
// late costs nothing. Trivially destructible: when the process ends, threads may still look.
class Pool {
 public:
  struct Job {
    int64_t num_units;
    void (*work)(void* context, int64_t unit, int64_t worker);
    void* context;
    std::fenv_t environment;
  };

  // False when another call has the threads, or this thread's own has: nothing was done.
  [[nodiscard]] bool try_run(const Job& job, uint32_t num_helpers) {
    if (taken_.exchange(true, std::memory_order_acquire)) return false;
    start_threads(num_helpers);
    job_ = job;
    next_.store(0, std::memory_order_relaxed);
    const uint32_t seats = std::min(num_helpers, num_threads_);
    state_.store(seats * kSeat, std::memory_order_seq_cst);
    wake_some(seats);
    run_claims(0);
    state_.fetch_and(kWorking, std::memory_order_relaxed);
    wait_for_threads();
    taken_.store(false, std::memory_order_release);
    return true;
  }

 private:
  static constexpr uint32_t kSeat = 1 << 16;
  static constexpr uint32_t kWorking = kSeat - 1;

  // ---- the caller

  void start_threads(uint32_t count) {
    if (num_threads_ >= count || refused_) return;
    pthread_attr_t detached;
    if (!is_prepared_for_fork || pthread_attr_init(&detached) != 0) return;
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    // A new thread blocks what its maker does. Signals are for the program's own threads, but for those that tell of a
    // fault of the thread itself: blocked, they would end the process without its handlers.
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    while (num_threads_ < count) {
      pthread_t thread;
      refused_ = pthread_create(&thread, &detached, serve, nullptr) != 0;  // then those that run do all the work
      if (refused_) break;
      char name[16];
      std::snprintf(name, sizeof name, "pagecore-%u", ++num_threads_);
      pthread_setname_np(thread, name);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&detached);
  }

  void wait_for_threads() {
    const auto all_left = [this] { return state_.load(std::memory_order_acquire) == 0; };
    if (spin_until(all_left)) return;
    while (!all_left()) {
      caller_sleeps_.store(1, std::memory_order_seq_cst);
      if (state_.load(std::memory_order_seq_cst) != 0) sleep_on(caller_sleeps_, 1);
    }
  }

  // In a child process, whose only thread is the one that forked: there are no threads, and no other thread's call.
  static void forget_threads();

  // ---- the threads

  static void* serve(void*);

  [[noreturn]] void serve() {
    for (;;) {
      const uint32_t seat = take_seat();
      wake_some(seat - 1);
      std::fesetenv(&job_.environment);
      run_claims(seat);
      leave();
    }
  }

  uint32_t take_seat() {
    uint32_t seen = 0;
    const auto try_take = [&] {
      seen = state_.load(std::memory_order_relaxed);
      return seen >= kSeat && state_.compare_exchange_strong(seen, seen - kSeat + 1, std::memory_order_acquire,
                                                             std::memory_order_relaxed);
    };
    while (!spin_until(try_take)) {
      asleep_.fetch_add(1, std::memory_order_seq_cst);
      if (seen < kSeat) sleep_on(state_, seen);
      asleep_.fetch_sub(1, std::memory_order_relaxed);
    }
    return seen / kSeat;
  }

  void leave() {
    uint32_t seen = state_.load(std::memory_order_relaxed);
    while (!state_.compare_exchange_weak(seen, (seen & kWorking) - 1, std::memory_order_seq_cst,
                                         std::memory_order_relaxed)) {
    }
    if ((seen & kWorking) == 1 && caller_sleeps_.load(std::memory_order_seq_cst) != 0) {
      caller_sleeps_.store(0, std::memory_order_relaxed);
      wake(caller_sleeps_, 1);
    }
  }

  // ---- both

  // The caller wakes a few, and they wake others: waking takes 1 us each. A thread counts itself as asleep and then
  // compares the state; a caller opens seats and then reads the count. One of the two sees the other.
  void wake_some(uint32_t open_seats) {
    constexpr uint32_t kAtOnce = 4;
    if (open_seats > 0 && asleep_.load(std::memory_order_seq_cst) > 0) wake(state_, std::min(open_seats, kAtOnce));
  }

  void run_claims(int64_t worker) {
    for (;;) {
      const int64_t unit = next_.fetch_add(1, std::memory_order_relaxed);
      if (unit >= job_.num_units) return;
      job_.work(job_.context, unit, worker);
    }
  }

  alignas(64) Word state_{0};
  Word asleep_{0};  // threads, on state_
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) Job job_{};
  std::atomic<bool> taken_{false};
  Word caller_sleeps_{0};
  // Of whoever has taken_:
  uint32_t num_threads_ = 0;
  bool refused_ = false;

  static const bool is_prepared_for_fork;
};

constinit Pool pool;

// From the start: a child that is forked while the first call takes the threads must not find them taken for ever.
const bool Pool::is_prepared_for_fork = pthread_atfork(nullptr, nullptr, forget_threads) == 0;

void Pool::forget_threads() {
  pool.state_.store(0, std::memory_order_relaxed);
  pool.asleep_.store(0, std::memory_order_relaxed);
  pool.caller_sleeps_.store(0, std::memory_order_relaxed);
  pool.num_threads_ = 0;
  pool.refused_ = false;
  pool.taken_.store(false, std::memory_order_relaxed);
}

void* Pool::serve(void*) { pool.serve(); }

}  // namespace

void run_units(int64_t num_units, int64_t num_threads, void (*work)(void* context, int64_t unit, int64_t worker),
               void* context) {
  const int64_t helpers = std::min({num_units, num_threads, kMaxThreads}) - 1;
  if (helpers > 0) {
    Pool::Job job{num_units, work, context, {}};
    std::fegetenv(&job.environment);
    if (pool.try_run(job, static_cast<uint32_t>(helpers))) return;
  }
  for (int64_t unit = 0; unit < num_units; ++unit) work(context, unit, 0);
}

}  // namespace pagecore::cpu
