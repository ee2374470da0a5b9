// fork() while threads lock pools one by one and several at once, and make and destroy others: fork() does not
// deadlock, and in the child no call is half done.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>

#include "pagecore/index/tables/block_tables.hpp"
#include "tests/native/harness.hpp"

using namespace pagecore;
using namespace pagecore::test;

namespace {

constexpr BlockId kBlocks = 400;
constexpr int kForks = 25;

// ASan of GCC 12 does not lock its allocator for fork(), as glibc does: a lock of a size class that another thread
// holds at that moment stays locked in the child, where malloc() and free() may wait for it forever. With ASan, the
// child therefore allocates nothing; the other builds check the rest.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kChildAllocates = false;
#else
constexpr bool kChildAllocates = true;
#endif

struct Inherited {
  std::shared_ptr<BlockPool> first = std::make_shared<BlockPool>(kBlocks, Order::Lifo);
  std::shared_ptr<BlockPool> second = std::make_shared<BlockPool>(kBlocks, Order::Address);
  std::vector<BlockId> blocks = std::vector<BlockId>(kBlocks);  // of a child, allocated before fork()
  std::atomic<bool> is_over{false};
};

// Takes many blocks of one pool and frees them one by one.
void take_and_free(Inherited& inherited) {
  std::vector<BlockId> blocks(100);
  while (!inherited.is_over) {
    if (inherited.first->try_allocate(blocks)) inherited.first->free(blocks);
  }
}

// Locks both pools in the order of their addresses.
void step(Inherited& inherited) {
  BlockTables tables({inherited.second, inherited.first}, {1, 1}, 1, 64);
  const RowId row = tables.add({});
  const TokenCount count = 64, none = 0;
  std::vector<int64_t> slots(64);
  const std::vector<SlotsOut> out(2, {slots.data(), 64, SlotType::Int64});
  while (!inherited.is_over) {
    static_cast<void>(tables.try_extend({&row, 1}, {&count, 1}, out));
    tables.truncate({&row, 1}, {&none, 1}, false);
  }
}

void make_and_destroy(Inherited& inherited) {
  while (!inherited.is_over) {
    BlockPool pool(9, Order::Fifo);
    if (pool.num_free() != 8) std::abort();
  }
}

// Exit status of the child: 0 if each pool is consistent and allocates.
int look_at(Inherited& inherited) {
  for (BlockPool* pool : {inherited.first.get(), inherited.second.get()}) {
    if (kChildAllocates) pool->check_invariants();
    const std::span rest(inherited.blocks.data(), static_cast<size_t>(pool->num_free()));
    if (!pool->try_allocate(rest) || pool->num_used() != kBlocks - 1) return 2;
  }
  if (!kChildAllocates) return 0;
  const BlockPool another(9, Order::Lifo);
  return another.num_free() == 8 ? 0 : 3;
}

}  // namespace

PC_TEST(a_forked_child_finds_every_pool_between_two_calls) {
  Inherited inherited;
  std::vector<std::thread> threads;
  for (const auto work : {take_and_free, step, make_and_destroy}) threads.emplace_back(work, std::ref(inherited));
  for (int i = 0; i < kForks; ++i) {
    const pid_t child = fork();
    PC_CHECK(child >= 0, "fork() failed");
    if (child == 0) {
      alarm(60);  // a child that hangs ends by a signal
      _exit(look_at(inherited));
    }
    int status = -1;
    PC_CHECK(waitpid(child, &status, 0) == child && status == 0, "the child ended with ", status);
  }
  inherited.is_over = true;
  for (std::thread& thread : threads) thread.join();
  inherited.first->check_invariants();
  inherited.second->check_invariants();
}
