// The host operations for native code of other extensions, which has no interpreter at hand: the kernels are linked
// into ops/cpu/_cpu alone, and no exception leaves it.
#pragma once

#include <cstdint>
#include <string>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/args.hpp"

namespace pagecore::cpu {

// Why a call did nothing.
struct Failure {
  ErrorKind kind = ErrorKind::Internal;
  std::string message;
};

// As in ops.hpp, from any thread. False where the operation raised: then `failure` is filled, and nothing was written.
struct HostCalls {
  bool (*attention)(const AttentionArgs& args, int64_t num_threads, Failure& failure) noexcept;
  bool (*write_kv)(const WriteArgs& args, int64_t num_threads, Failure& failure) noexcept;
};

[[nodiscard]] const HostCalls& host_calls() noexcept;

}  // namespace pagecore::cpu
