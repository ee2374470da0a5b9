#include "block.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <new>
#include <numeric>
#include <random>
#include <vector>

namespace emulator {

Place place;
Counts counts;
int planted_fault;
uint32_t num_accesses;
Block block;

namespace {

const Launch* current;
Fiber launcher;
bool failed;
char message[4096];

// Warp and lane at each position of the order in which they run.
int warp_at[kMaxThreads / kLanes];
int lane_at[kLanes];
int running_warp;  // position in the order, as running_lane
int running_lane;

#if defined(__SANITIZE_ADDRESS__)
constexpr size_t kStackBytes = 1 << 18;
#else
constexpr size_t kStackBytes = 1 << 16;
#endif

uint32_t bit(int i) { return 1u << i; }

Thread& thread_at(int warp, int lane) { return block.threads[warp * kLanes + lane]; }

void step_to(int warp, int lane) {
  num_accesses = 0;
  running_warp = warp;
  running_lane = lane;
  place.warp = warp_at[warp];
  place.lane = lane_at[lane];
  place.thread = place.warp * kLanes + place.lane;
}

bool find_ready_lane(int warp, int after, int& lane) {
  const Warp& w = block.warps[warp];
  const uint32_t ready = w.alive & ~w.waiting & ~w.at_barrier;
  if (ready == 0) return false;
  const uint32_t later = after < 31 ? ready & (~0u << (after + 1)) : 0;
  lane = std::countr_zero(later != 0 ? later : ready);
  return true;
}

bool find_ready(int& warp, int& lane) {
  warp = running_warp;
  if (find_ready_lane(warp, running_lane, lane)) return true;
  for (int i = 1; i < block.num_warps; ++i) {
    warp = running_warp + i < block.num_warps ? running_warp + i : running_warp + i - block.num_warps;
    if (find_ready_lane(warp, 31, lane)) return true;
  }
  return false;
}

// Switches to a ready thread; returns when this thread is ready again.
void yield(Site site) {
  int warp = 0;
  int lane = 0;
  if (!find_ready(warp, lane)) fail(site, "deadlock in the emulator: no thread is ready");
  const int own_warp = running_warp;
  const int own_lane = running_lane;
  step_to(warp, lane);
  switch_fibers(thread_at(own_warp, own_lane).fiber, thread_at(warp, lane).fiber);
}

bool is_same(Site one, Site other) {
  return std::memcmp(&one, &other, sizeof(Site)) == 0 || (one.line() == other.line() && one.column() == other.column());
}

int first_thread(int warp, uint32_t lanes) { return warp_at[warp] * kLanes + lane_at[std::countr_zero(lanes)]; }

void finish() {
  const Site site = Site::current();
  Warp& w = block.warps[running_warp];
  if (w.waiting != 0) {
    fail(w.site, "%s is reached by a part of the warp: thread %d is there, this one has finished", w.operation,
         first_thread(running_warp, w.waiting));
  }
  if (block.num_at_barrier != 0) {
    fail(block.barrier_site, "pc_sync_block is reached by %d threads of the block, this one has finished",
         block.num_at_barrier);
  }
  expect_no_copies();
  w.alive &= ~bit(running_lane);
  --block.num_alive;
  Fiber& own = thread_at(running_warp, running_lane).fiber;
  int warp = 0;
  int lane = 0;
  if (block.num_alive == 0) leave_fiber(own, launcher);
  if (!find_ready(warp, lane)) fail(site, "deadlock in the emulator: no thread is ready");
  step_to(warp, lane);
  leave_fiber(own, thread_at(warp, lane).fiber);
}

void run_thread() {
  entered_fiber();
  current->kernel(current->parameters);
  finish();
}

void make_stacks() {
  if (block.threads[0].fiber.stack != nullptr) return;
  const size_t guard = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t step = kStackBytes + guard;
  void* all = mmap(nullptr, step * kMaxThreads, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) throw std::bad_alloc();
  for (int t = 0; t < kMaxThreads; ++t) {
    char* const stack = static_cast<char*>(all) + t * step + guard;
    if (mprotect(stack, kStackBytes, PROT_READ | PROT_WRITE) != 0) throw std::bad_alloc();
    block.threads[t].fiber.stack = stack;
    block.threads[t].fiber.stack_size = kStackBytes;
  }
}

void run_block(const Launch& launch, int64_t number) {
  begin_block_of_order(static_cast<uint32_t>(number));
  begin_block_of_shared(launch.shared_bytes);
  block.num_warps = (launch.num_threads + kLanes - 1) / kLanes;
  block.num_alive = launch.num_threads;
  block.num_at_barrier = 0;
  ++block.epoch;
  for (int w = 0; w < block.num_warps; ++w) {
    Warp& warp = block.warps[w];
    warp = Warp{};
    warp.epoch = 1;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (warp_at[w] * kLanes + lane_at[lane] >= launch.num_threads) continue;
      warp.present |= bit(lane);
      prepare(thread_at(w, lane).fiber, run_thread);
    }
    warp.alive = warp.present;
  }
  running_warp = 0;
  running_lane = 31;
  int warp = 0;
  int lane = 0;
  find_ready(warp, lane);
  step_to(warp, lane);
  switch_fibers(launcher, thread_at(warp, lane).fiber);
}

}  // namespace

const char* run(const Launch& launch) {
  make_stacks();
  describe_own_stack(launcher);
  current = &launch;
  failed = false;
  counts = {};
  block.epoch = 0;
  begin_launch_of_order(launch.may_overwrite);
  std::copy_n(launch.num_blocks, 3, place.num_blocks);
  place.num_threads = launch.num_threads;

  const int64_t num_blocks = int64_t{launch.num_blocks[0]} * launch.num_blocks[1] * launch.num_blocks[2];
  std::vector<int64_t> order(num_blocks);
  std::iota(order.begin(), order.end(), 0);
  std::iota(std::begin(lane_at), std::end(lane_at), 0);
  const int num_warps = (launch.num_threads + kLanes - 1) / kLanes;
  std::iota(warp_at, warp_at + num_warps, 0);
  std::mt19937_64 random(launch.seed);
  if (launch.seed != 0) std::shuffle(order.begin(), order.end(), random);
  for (const int64_t b : order) {
    if (launch.seed != 0) {
      std::shuffle(std::begin(lane_at), std::end(lane_at), random);
      std::shuffle(warp_at, warp_at + num_warps, random);
    }
    place.block[0] = static_cast<int>(b % launch.num_blocks[0]);
    place.block[1] = static_cast<int>(b / launch.num_blocks[0] % launch.num_blocks[1]);
    place.block[2] = static_cast<int>(b / launch.num_blocks[0] / launch.num_blocks[1]);
    run_block(launch, b);
    if (failed) break;
  }
  end_launch_of_order();
  return failed ? message : nullptr;
}

namespace {

// A file of the kernels from the folder cuda_src on, and the name of any other.
const char* shown(const char* file) {
  const char* kernels = std::strstr(file, "cuda_src/");
  if (kernels != nullptr) return kernels;
  const char* slash = std::strrchr(file, '/');
  return slash != nullptr ? slash + 1 : file;
}

[[noreturn]] void end_launch(const char* file, unsigned line, const char* format, std::va_list arguments) {
  const int length = std::snprintf(
      message, sizeof(message), "%s, block (%d, %d, %d), thread %d (warp %d, lane %d), %s:%u: ", current->name,
      place.block[0], place.block[1], place.block[2], place.thread, place.warp, place.lane, shown(file), line);
  if (length < static_cast<int>(sizeof(message))) {
    std::vsnprintf(message + length, sizeof(message) - length, format, arguments);
  }
  failed = true;
  leave_fiber(thread_at(running_warp, running_lane).fiber, launcher);
}

}  // namespace

void fail(Site site, const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  end_launch(site.file_name(), site.line(), format, arguments);
}

void fail_at(const char* file, unsigned line, const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  end_launch(file, line, format, arguments);
}

Accessor running_thread() { return {place.warp, 1u << place.lane, {block.epoch, block.warps[running_warp].epoch}}; }

void act_as_lane(int lane) {
  place.lane = lane;
  place.thread = place.warp * kLanes + lane;
}

void meet(const char* operation, const void* operand, void (*work)(const void* const (&operands)[kLanes]), Site site) {
  Warp& w = block.warps[running_warp];
  if (w.present != ~0u) fail(site, "%s needs 32 lanes; this warp has %d", operation, std::popcount(w.present));
  if (w.alive != ~0u) {
    fail(site, "%s is reached by a part of the warp: thread %d has finished", operation,
         first_thread(running_warp, ~w.alive));
  }
  if (w.at_barrier != 0) {
    fail(site, "%s is reached by a part of the warp: thread %d is at pc_sync_block (line %u)", operation,
         first_thread(running_warp, w.at_barrier), block.barrier_site.line());
  }
  if (w.waiting == 0) {
    w.operation = operation;
    w.site = site;
  } else if (w.operation != operation || !is_same(w.site, site)) {
    fail(site, "%s is reached by a part of the warp: thread %d is at %s (line %u)", operation,
         first_thread(running_warp, w.waiting), w.operation, w.site.line());
  }
  thread_at(running_warp, running_lane).operand = operand;
  w.waiting |= bit(running_lane);
  if (w.waiting != ~0u) return yield(site);
  if (work != nullptr) {
    const void* operands[kLanes];
    for (int i = 0; i < kLanes; ++i) operands[lane_at[i]] = thread_at(running_warp, i).operand;
    work(operands);
  }
  w.waiting = 0;
}

void sync_warp(Site site) {
  meet("pc_sync_warp", nullptr, [](const void* const(&)[kLanes]) { ++block.warps[running_warp].epoch; }, site);
}

void sync_block(Site site) {
  Warp& w = block.warps[running_warp];
  if (w.waiting != 0) {
    fail(site, "pc_sync_block is reached by a part of the warp: thread %d is at %s (line %u)",
         first_thread(running_warp, w.waiting), w.operation, w.site.line());
  }
  if (block.num_alive != place.num_threads) {
    fail(site, "pc_sync_block is reached by a part of the block: %d of its %d threads have finished",
         place.num_threads - block.num_alive, place.num_threads);
  }
  if (block.num_at_barrier == 0) {
    block.barrier_site = site;
  } else if (!is_same(block.barrier_site, site)) {
    fail(site, "pc_sync_block is reached by a part of the block: %d threads are at the barrier of line %u",
         block.num_at_barrier, block.barrier_site.line());
  }
  w.at_barrier |= bit(running_lane);
  if (++block.num_at_barrier != block.num_alive) return yield(site);
  for (int i = 0; i < block.num_warps; ++i) block.warps[i].at_barrier = 0;
  block.num_at_barrier = 0;
  ++block.epoch;
}

}  // namespace emulator
