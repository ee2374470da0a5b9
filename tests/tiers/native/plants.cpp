// Planted faults inside the code of the tiers: each sanitizer must instrument it.
#include "pagecore/tiers/disk/slab_table.hpp"
#include "tests/tiers/native/files.hpp"

using namespace pagecore;
using namespace pagecore::test;
using namespace pagecore::tiers;

#if defined(__SANITIZE_ADDRESS__)

PC_PLANT(sum_past_the_payload, "AddressSanitizer: heap-buffer-overflow") {
  const Exact<uint8_t> data(8);
  static_cast<void>(seed_of(data.data()));
}

PC_PLANT(payload_freed_before_its_job_ends, "AddressSanitizer: heap-use-after-free") {
  MemoryFile::only().reset(1 << 20);
  IoQueue queue(1, kMemoryOps);
  char* volatile freed = nullptr;  // hidden from the compiler, which would refuse it
  {
    const Payload memory(5000);
    freed = memory.data();
  }
  queue.submit(std::make_unique<Job>(1, Direction::Store, std::vector<Transfer>{{3, 8192, freed, 5000, 0}}));
  static_cast<void>(queue.drain(10));
}

#elif defined(__SANITIZE_THREAD__)

PC_PLANT(payload_read_before_its_job_ends, "ThreadSanitizer: data race") {
  MemoryFile::only().reset(1 << 20);
  const Payload memory(5000);
  IoQueue queue(1, kMemoryOps);
  queue.submit(std::make_unique<Job>(1, Direction::Load, std::vector<Transfer>{{3, 8192, memory.data(), 5000, 0}}));
  in_threads(1, [&](int) {
    volatile char sum = 0;
    for (int i = 0; i < 1000; ++i) {
      for (int at = 0; at < 5000; ++at) sum = static_cast<char>(sum + memory.data()[at]);
    }
  });
  static_cast<void>(queue.drain(10));
}

#endif
