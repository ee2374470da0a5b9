#include "pagecore/ops/cpu/threads/threads.hpp"

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

// Sleeps until woken; returns at once if the word is no longer `seen`. May also wake spuriously.
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

// Returns true if `condition` holds within the time that sleeping and waking would take, because calls often follow
// each other closely.
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

// The threads, and the one call that uses them.
//
// state_ is (seats << 16 | working): the number of threads that may still join the call, and the number that have
// joined, not counting the caller.
//
//   0 -> open (seats > 0) -> closed (seats == 0, working > 0) -> 0
//
// I1: the caller holds taken_ from before state_ leaves 0 until state_ is 0 again. I2: job_ is written only in state 0;
// a thread reads it between taking a seat and leaving, while state_ is not 0. I3: the seats of a call are numbered 1 ..
// num_threads - 1, each taken once; the caller is worker 0.
//
// A call closes as soon as its units are claimed and waits only for threads that have joined, so a thread that wakes
// late costs nothing. Trivially destructible, because threads may still read the pool while the process exits.
class Pool {
 public:
  struct Job {
    int64_t num_units;
    void (*work)(void* context, int64_t unit, int64_t worker);
    void* context;
    std::fenv_t environment;
  };

  // Returns false, having done nothing, if another call uses the threads, including a call further up this thread's
  // stack.
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
    // A new thread inherits the signal mask. Asynchronous signals are for the program's own threads, so the mask blocks
    // them. Faults of the thread itself stay unblocked: blocked, they would end the process without running its
    // handlers.
    sigset_t blocked, before;
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) sigdelset(&blocked, fault);
    pthread_sigmask(SIG_SETMASK, &blocked, &before);
    while (num_threads_ < count) {
      pthread_t thread;
      refused_ = pthread_create(&thread, &detached, serve, nullptr) != 0;  // then the existing threads do all the work
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

  // Called in a forked child: the pool's threads do not exist there, and no call is in progress.
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

  // The caller wakes a few threads, and they wake others, because one wake-up takes 1 us. A thread counts itself as
  // asleep and then compares the state; a caller opens seats and then reads the count. So one of the two sees the
  // other.
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
  Word asleep_{0};  // threads that sleep on state_
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) Job job_{};
  std::atomic<bool> taken_{false};
  Word caller_sleeps_{0};
  // Accessed only by the caller that holds taken_.
  uint32_t num_threads_ = 0;
  bool refused_ = false;

  static const bool is_prepared_for_fork;
};

constinit Pool pool;

// Registered at load time: a child forked while the first call holds taken_ must not find it held forever.
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
