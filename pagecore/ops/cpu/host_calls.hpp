// The host operations as function pointers, for native code of other extensions that does not hold the GIL. The kernels
// are linked into ops/cpu/_cpu alone. Exceptions do not cross to another extension.
#pragma once

#include <cstdint>
#include <string>

#include "pagecore/native/checks.hpp"
#include "pagecore/ops/cpu/args.hpp"

namespace pagecore::cpu {

// The error of a call.
struct Failure {
  ErrorKind kind = ErrorKind::Internal;
  std::string message;
};

// The functions of ops.hpp and codecs/seal.hpp, callable from any thread. They return false after an error; `failure`
// then describes it, and nothing was written.
struct HostCalls {
  bool (*attention)(const AttentionArgs& args, int64_t num_threads, Failure& failure) noexcept;
  bool (*write_kv)(const WriteArgs& args, int64_t num_threads, Failure& failure) noexcept;
  bool (*seal_blocks)(const SealArgs& args, int64_t num_threads, Failure& failure) noexcept;
  bool (*unseal_blocks)(const SealArgs& args, int64_t num_threads, Failure& failure) noexcept;
};

[[nodiscard]] const HostCalls& host_calls() noexcept;

}  // namespace pagecore::cpu
