// What the emulated primitives are made of: one block at a time, whose threads are fibers that hand over at
// collectives.
//
// Threads run in a fixed order of warps and lanes (a seed changes it), each until it waits for others. The last one to
// reach a collective does its work for all of them. Nothing here is thread-safe: one launch runs at a time.
//
// Every function takes the place in the kernel's source that called it; errors name it and end the launch.
#pragma once

#include <cstdint>
#include <source_location>

namespace emulator {

using Site = std::source_location;

inline constexpr int kLanes = 32;
inline constexpr int kMaxThreads = 1024;

// Where the running thread is.
struct Place {
  int thread;
  int lane;
  int warp;
  int num_threads;
  int block[3];
  int num_blocks[3];
};
extern Place place;

// Ends the launch; what is said follows the names of kernel, block, thread and place.
[[noreturn]] void fail(const Site& site, const char* format, ...) __attribute__((format(printf, 2, 3)));
[[noreturn]] void fail_at(const char* file, unsigned line, const char* format, ...)
    __attribute__((format(printf, 3, 4)));

// What a launch has done so far, in the order of runtime.py.
struct Counts {
  uint64_t read_bytes;    // of device memory, asynchronous copies left out
  uint64_t copied_bytes;  // by those, zeros left out
  uint64_t written_bytes;
  uint64_t matrix_loads;      // of 8 x 8 elements, four to each pc_load_matrices
  uint64_t matrix_conflicts;  // how many more times than once the banks of shared memory were asked for them
  uint64_t most_accesses;     // to device memory that a thread made between two collectives
};
extern Counts counts;

// ---- collectives

void sync_block(const Site& site);
void sync_warp(const Site& site);

enum class Shuffle { exclusive_or, from_lane, up };
uint32_t shuffle(Shuffle kind, uint32_t value, int operand, const Site& site);
uint32_t ballot(bool condition, const Site& site);

void load_matrices(uint32_t (&r)[4], uint32_t row, bool transposed, const Site& site);

enum class MatrixType { bfloat16, half };
void multiply(MatrixType type, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const Site& site);

// ---- device memory

// Some memory that kernels may use.
struct Allocation {
  uint64_t begin;
  uint64_t size;
  // For each byte which write of this launch it holds (see order.hpp); null while none of them was written.
  uint32_t* writes = nullptr;

  bool holds(uint64_t address, uint64_t num_bytes) const {
    return num_bytes <= size && address - begin <= size - num_bytes;
  }
};

// The one around an address, or null.
const Allocation* find_allocation(uint64_t address);

// Says which access it is that lies outside the allocation of its pointer, or outside all where that is null.
[[noreturn]] void fail_access(const char* what, uint64_t address, uint64_t num_bytes, const Allocation* allocation,
                              const Site& site);
[[noreturn]] void fail_alignment(const char* what, uint64_t address, uint64_t alignment, const Site& site);

// Accesses since the running thread last waited: one that makes ever more of them waits for another block.
extern uint32_t num_accesses;
inline constexpr uint32_t kMaxAccesses = 1 << 26;
[[noreturn]] void fail_endless(const Site& site);

// Accesses and fences, for their order among threads and blocks. A write is told before it is done.
void note_device_read(const Allocation& allocation, uint64_t address, uint32_t num_bytes, const Site& site);
void note_device_write(const Allocation& allocation, uint64_t address, const void* value, uint32_t num_bytes,
                       const Site& site);
void note_device_atomic(const Allocation& allocation, uint64_t address, uint32_t num_bytes);
void fence_device();

// ---- shared memory

// Where its first byte lies: a multiple of 128 and of nothing larger, as no kernel may count on more.
inline constexpr uint32_t kSharedBase = 1152;

uint32_t shared_size();
// By the offset in the buffer; the sizes are 1, 2, 4, 8 or 16 bytes or a multiple of 4.
void read_shared(void* result, int64_t offset, uint32_t num_bytes, uint32_t alignment, const Site& site);
void write_shared(const void* value, int64_t offset, uint32_t num_bytes, uint32_t alignment, const Site& site);

// `source` is 0 where zeros are written.
void copy_async(uint32_t target, uint64_t source, const Site& site);
void commit_copies();
void wait_copies(int max_groups);

}  // namespace emulator
