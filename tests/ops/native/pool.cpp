// The thread pool: every unit runs once, worker numbers are distinct, concurrent callers, forks, and rounding modes.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <cstring>
#include <thread>

#include "pagecore/ops/cpu/threads/threads.hpp"
#include "tests/native/harness.hpp"

using namespace pagecore::test;
using namespace pagecore::cpu;

namespace {

// Plain counters: TSan must see that every unit belongs to one thread and is done when the call returns.
void every_unit_runs_once(int64_t num_units, int64_t num_threads) {
  Exact<int> runs(static_cast<size_t>(num_units));
  runs.fill(0);
  std::vector<std::atomic<int>> at_work(static_cast<size_t>(num_threads));
  parallel_for(num_units, num_threads, [&](int64_t unit, int64_t worker) noexcept {
    PC_CHECK(worker >= 0 && worker < num_threads, worker, " of ", num_threads);
    PC_CHECK(at_work[static_cast<size_t>(worker)].fetch_add(1) == 0, "two threads are worker ", worker);
    ++runs[static_cast<size_t>(unit)];
    at_work[static_cast<size_t>(worker)].fetch_sub(1);
  });
  for (const int count : runs.copy()) PC_CHECK(count == 1, "a unit ran ", count, " times");
}

// Returns when `count` threads are in it at the same time.
void meet(std::atomic<int>& inside, int count) {
  inside.fetch_add(1);
  while (inside.load() < count) std::this_thread::yield();
}

#if !defined(__SANITIZE_THREAD__)  // TSan does not support threads started in the child of a multi-threaded process

// qemu-user does not support them either; the process then has qemu's name.
bool can_fork() {
  char name[16] = {};
  prctl(PR_GET_NAME, name);
  return std::strncmp(name, "qemu-", 5) != 0;
}

// Runs body() in a forked child, which reports success by its exit status.
template <typename Body>
void in_child(Body&& body) {
  const pid_t child = fork();
  PC_CHECK(child >= 0, "fork failed");
  if (child == 0) {
    alarm(60);
    body();
    _exit(42);
  }
  int status = 0;
  PC_CHECK(waitpid(child, &status, 0) == child, "waitpid failed");
  PC_CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 42, "the child ended with status ", status);
}

#endif

}  // namespace

PC_TEST(pool_runs_every_unit_once) {
  rounds(300, [](Random& random) {
    every_unit_runs_once(random.pick({int64_t{0}, int64_t{1}, random.between(2, 9), random.between(0, 2000)}),
                         random.pick({int64_t{1}, int64_t{2}, random.between(1, 12)}));
  });
}

PC_TEST(pool_runs_on_the_requested_number_of_threads) {
  for (const int threads : {2, 5, 3, 9}) {
    rounds(20, [&](Random&) {
      std::atomic<int> inside{0};
      std::atomic<uint64_t> workers{0};
      parallel_for(threads, threads, [&](int64_t, int64_t worker) noexcept {
        workers.fetch_or(uint64_t{1} << worker);
        meet(inside, threads);
      });
      PC_CHECK(workers.load() == (uint64_t{1} << threads) - 1, "workers ", workers.load(), " of ", threads);
    });
  }
}

PC_TEST(pool_wakes_threads_that_fell_asleep) {
  rounds(20, [](Random& random) {
    std::this_thread::sleep_for(std::chrono::microseconds(random.between(0, 60)));
    std::atomic<int> inside{0};
    parallel_for(3, 3, [&](int64_t, int64_t) noexcept { meet(inside, 3); });
  });
}

PC_TEST(pool_wakes_a_caller_that_fell_asleep) {
  rounds(20, [](Random& random) {
    const auto nap = std::chrono::microseconds(random.between(0, 200));
    std::atomic<int> inside{0};
    int slept = 0;
    parallel_for(2, 2, [&](int64_t, int64_t worker) noexcept {
      meet(inside, 2);
      if (worker == 0) return;
      std::this_thread::sleep_for(nap);
      ++slept;
    });
    PC_CHECK(slept == 1, "the call returned before its threads");
  });
}

PC_TEST(pool_serves_concurrent_callers) {
  rounds(10, [](Random& random) {
    const std::vector<uint64_t> seeds = random.seeds(5);
    in_threads(5, [&](int who) {
      Random mine(seeds[static_cast<size_t>(who)]);
      for (int i = 0; i < 50; ++i) every_unit_runs_once(mine.between(0, 300), mine.between(1, 6));
    });
  });
}

PC_TEST(pool_runs_a_call_from_a_unit_of_work_on_the_thread_that_makes_it) {
  rounds(10, [](Random&) {
    std::atomic<int> inner{0};
    parallel_for(20, 4, [&](int64_t, int64_t) noexcept {
      const std::thread::id here = std::this_thread::get_id();
      parallel_for(30, 4, [&](int64_t, int64_t worker) noexcept {
        PC_CHECK(worker == 0 && std::this_thread::get_id() == here, "a nested unit ran elsewhere");
        inner.fetch_add(1);
      });
    });
    PC_CHECK(inner.load() == 20 * 30, inner.load());
  });
}

PC_TEST(pool_rounds_as_its_caller_does) {
  for (const int mode : {FE_UPWARD, FE_TOWARDZERO, FE_TONEAREST}) {
    std::fesetround(mode);
    std::atomic<int> inside{0};
    parallel_for(3, 3, [&](int64_t, int64_t) noexcept {
      meet(inside, 3);
      PC_CHECK(std::fegetround() == mode, "mode ", std::fegetround(), " instead of ", mode);
    });
  }
}

#if !defined(__SANITIZE_THREAD__)

PC_TEST(pool_works_in_a_child_and_in_its_child) {
  if (!can_fork()) return;
  rounds(10, [](Random&) {
    every_unit_runs_once(100, 4);
    in_child([] {
      std::atomic<int> inside{0};
      parallel_for(4, 4, [&](int64_t, int64_t) noexcept { meet(inside, 4); });
      in_child([] { every_unit_runs_once(100, 3); });
      every_unit_runs_once(100, 6);
    });
    every_unit_runs_once(100, 4);
  });
}

PC_TEST(pool_works_in_a_child_forked_during_a_call) {
  if (!can_fork()) return;
  rounds(20, [](Random& random) {
    std::atomic<bool> stop{false}, runs{false};
    std::thread other([&] {
      while (!stop.load()) {
        parallel_for(50, 3, [&](int64_t, int64_t) noexcept { runs.store(true); });
      }
    });
    while (!runs.load()) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(random.between(0, 100)));
    in_child([] {
      std::atomic<int> inside{0};
      parallel_for(3, 3, [&](int64_t, int64_t) noexcept { meet(inside, 3); });
    });
    stop.store(true);
    other.join();
  });
}

#else

PC_PLANT(race_of_two_units, "ThreadSanitizer: data race") {
  std::atomic<int> inside{0};
  int shared = 0;
  parallel_for(2, 2, [&](int64_t, int64_t) noexcept {
    inside.fetch_add(1, std::memory_order_relaxed);
    while (inside.load(std::memory_order_relaxed) < 2) std::this_thread::yield();
    ++shared;
  });
}

#endif
