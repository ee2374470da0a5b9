// Planted faults in the kernels of every instruction set and around them.
#include "pagecore/ops/cpu/dispatch.hpp"
#include "pagecore/ops/cpu/ops.hpp"
#include "tests/ops/native/floats.hpp"

using namespace pagecore;
using namespace pagecore::test;
using namespace pagecore::cpu;

namespace {

// Writes one row of 33 numbers, float32 to bfloat16, to `cache`, which has room for one.
void write_row(char* cache, const char* row, char* slots) {
  WriteArgs args;
  args.key = args.value = {const_cast<char*>(row), Float::F32, 1, 1, 33, 132, 132};
  args.key_cache = args.value_cache = {cache, Float::BF16, 1, 1, 1, 33, 66, 66, 66};
  args.slots = {slots, 1, 8, true};
  write_kv(args);
}

struct WriteBuffers {
  Exact<uint16_t> cache;
  Exact<float> row;
  Exact<int64_t> slots{2};

  WriteBuffers(size_t cache_size, size_t row_size) : cache(cache_size), row(row_size) {
    row.fill(1.0f);
    slots.fill(0);
  }
  void run(int64_t shift = 0) {
    write_row(reinterpret_cast<char*>(cache.data()), reinterpret_cast<const char*>(row.data()),
              reinterpret_cast<char*>(slots.data()) + shift);
  }
};

}  // namespace

#if defined(__SANITIZE_ADDRESS__)

namespace {

// A kernel that reads or writes one number too many, on each instruction set of this machine.
struct EveryIsa {
  EveryIsa() {
    for (const std::string& name : available_isas()) {
      const auto plant = [name](size_t cache_size, size_t row_size) {
        return [=] {
          set_isa(name);
          WriteBuffers(cache_size, row_size).run();
        };
      };
      planted_.emplace_back("write_past_the_end_on_" + name, "AddressSanitizer: heap-buffer-overflow", plant(32, 33));
      planted_.emplace_back("read_past_the_end_on_" + name, "AddressSanitizer: heap-buffer-overflow", plant(33, 32));
    }
  }
  std::vector<Planted> planted_;
};

const EveryIsa every_isa;

}  // namespace

PC_PLANT(misaligned_slot_mapping, "runtime error: load of misaligned address") { WriteBuffers(33, 33).run(4); }

PC_PLANT(signed_overflow_in_the_strides, "runtime error: signed integer overflow") {
  WriteBuffers buffers(33, 33);
  WriteArgs args;
  args.key = args.value = {reinterpret_cast<char*>(buffers.row.data()), Float::F32, 1, 1, 33, 132, 132};
  args.key_cache =
      args.value_cache = {reinterpret_cast<char*>(buffers.cache.data()), Float::BF16, INT64_MAX, 3, 1, 33, 66, 66, 66};
  args.slots = {reinterpret_cast<char*>(buffers.slots.data()), 1, 8, true};
  write_kv(args);
}

// The guard bytes show stray writes that sanitizers do not see.
PC_PLANT(stray_byte_next_to_an_array, "was written") {
  const Guarded memory(10, 3);
  ASAN_UNPOISON_MEMORY_REGION(memory.data() + 10, 8);
  volatile char* stray = memory.data();
  stray[12] = 1;
}

#elif defined(__SANITIZE_THREAD__)

PC_PLANT(race_of_two_writes_into_one_slot, "ThreadSanitizer: data race") {
  WriteBuffers shared(33, 33);
  in_threads(2, [&](int) {
    for (int i = 0; i < 200; ++i) shared.run();
  });
}

#endif
