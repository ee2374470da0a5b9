#include "pagecore/ops/cpu/host_calls.hpp"

#include "pagecore/ops/cpu/codecs/seal.hpp"
#include "pagecore/ops/cpu/ops.hpp"

namespace pagecore::cpu {
namespace {

constexpr HostCalls kCalls{
    .attention = [](const AttentionArgs& args, int64_t num_threads, Failure& failure) noexcept -> bool {
      return attempt([&] { attention(args, nullptr, num_threads); }, failure);
    },
    .write_kv = [](const WriteArgs& args, int64_t num_threads, Failure& failure) noexcept -> bool {
      return attempt([&] { write_kv(args, num_threads); }, failure);
    },
    .seal_blocks = [](const SealArgs& args, int64_t num_threads, Failure& failure) noexcept -> bool {
      return attempt([&] { seal_blocks(args, num_threads); }, failure);
    },
    .unseal_blocks = [](const SealArgs& args, int64_t num_threads, Failure& failure) noexcept -> bool {
      return attempt([&] { unseal_blocks(args, num_threads); }, failure);
    },
};

}  // namespace

const HostCalls& host_calls() noexcept { return kCalls; }

}  // namespace pagecore::cpu
