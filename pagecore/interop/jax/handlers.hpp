// Custom calls of pagecore for XLA on the host. They run on XLA's threads, without a Python interpreter.
//
// The Python side checks shapes and dtypes while it traces, and XLA ensures that buffers have these shapes and dtypes.
// The contents of index arrays and scales are checked here and in the operations, before anything is written. Buffers
// are dense and row-major.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "pagecore/interop/jax/buffers.hpp"
#include "pagecore/interop/jax/call_frame.hpp"
#include "pagecore/interop/jax/sealed_buffers.hpp"
#include "pagecore/ops/cpu/host_calls.hpp"

namespace pagecore::xla {

// Set once, before a handler is registered.
struct Host {
  const cpu::HostCalls* calls = nullptr;
  const std::atomic<int64_t>* num_threads = nullptr;
};
inline constinit Host host;

// ---- custom calls

template <typename Call>
[[nodiscard]] XLA_FFI_Error* serve(XLA_FFI_CallFrame* frame, Call&& call) noexcept {
  if (answered_version(*frame)) return nullptr;
  cpu::Failure failure;
  bool done = false;
  const bool returned = cpu::attempt(
      [&] {
        CallFrame arguments(*frame);
        done = call(arguments, failure);
      },
      failure);
  return returned && done ? nullptr : make_error(*frame, failure);
}

[[nodiscard]] inline int64_t threads_of_a_call() { return host.num_threads->load(std::memory_order_relaxed); }

// query, key_cache, value_cache, block_table, seq_lens, options -> out[, lse]
inline XLA_FFI_Error* paged_attention(XLA_FFI_CallFrame* call) noexcept {
  return serve(call, [](CallFrame& frame, cpu::Failure& failure) {
    const XLA_FFI_Buffer& query = frame.next_argument();
    const XLA_FFI_Buffer& keys = frame.next_argument();
    const XLA_FFI_Buffer& values = frame.next_argument();
    cpu::AttentionArgs args;
    args.table = table_of(frame.next_argument());
    args.seq_lens = indices_of(&frame.next_argument());
    Options options(frame);
    const XLA_FFI_Buffer* layer = options.next(kLayer);
    const CacheView view(frame, layer);
    args.query = rows_of(query);
    args.rows = indices_of(options.next(kRows));
    args.cu_query_lens = indices_of(options.next(kCuQueryLens));
    args.scale = frame.number("scale");
    args.softcap = frame.number("softcap");
    args.causal = frame.integer("causal") != 0;
    args.window_left = frame.integer("window_left");
    args.window_right = frame.integer("window_right");
    args.sink_tokens = frame.integer("sink_tokens");
    args.sinks = per_head(options.next(kSinks));
    args.alibi_slopes = per_head(options.next(kAlibiSlopes));
    if (const XLA_FFI_Buffer* mask = options.next(kMask)) {
      PC_ASSERT(mask->rank == 1 && mask->dtype == XLA_FFI_DataType_PRED);
      args.mask = static_cast<const uint8_t*>(mask->data);
      args.mask_size = mask->dims[0];
    }
    args.tree = tree_of(options.next(kTreeMask));
    args.tree.positions = indices_of(options.next(kPositions));
    args.key_scale = scales_of(options.next(kKeyScale), "key_scale", false, args.scale);
    args.value_scale = scales_of(options.next(kValueScale), "value_scale", false);
    args.key = view.of(keys, frame.integer("key_format"), options.next(kKeyPlane));
    args.value = view.of(values, frame.integer("value_format"), options.next(kValuePlane));
    const SealedPlanes planes = SealedPlanes::next(options);
    if (planes.key != nullptr) {
      args.sealed.key = sealed_keys(planes, layer, frame.integer("key_bits"));
      args.sealed.value = sealed_values(planes, layer, frame.integer("value_bits"));
      args.sealed.num_blocks = num_sealed_blocks(planes, layer);
      args.sealed.table = table_of(*options.next(kSealedTable));
      args.sealed.lens = indices_of(options.next(kSealedLens));
    }
    args.out = rows_of(frame.next_result());
    if (frame.has_more_results()) {
      args.lse = {static_cast<char*>(frame.next_result().data), args.out.num_tokens, args.out.num_heads * 4, 4};
    }
    PC_ASSERT(frame.is_done());
    const PlainArithmetic arithmetic;
    return host.calls->attention(args, threads_of_a_call(), failure);
  });
}

// The next result, an array with the contents of `given`. Usually it aliases `given`, or XLA has already copied `given`
// and passes the copy as both. Otherwise the contents are copied here.
[[nodiscard]] inline const XLA_FFI_Buffer& written_result(CallFrame& frame, const XLA_FFI_Buffer& given) {
  const XLA_FFI_Buffer& result = frame.next_result();
  if (result.data == given.data) return result;
  int64_t bytes = given.dtype == XLA_FFI_DataType_S32 ? 4 : size_of(stored_type(given));  // words of sealed blocks
  for (int64_t i = 0; i < given.rank; ++i) bytes *= given.dims[i];
  std::memcpy(result.data, given.data, static_cast<size_t>(bytes));
  return result;
}

// An array that a call changes; null for a plane that the caches do not have.
struct Written {
  const XLA_FFI_Buffer* buffer;
  const char* name;
};

// Fails if XLA has copied an array. `recorded` is the result of addresses() before XLA could copy one.
inline void check_addresses(std::span<const Written> written, const XLA_FFI_Buffer* recorded) {
  if (recorded == nullptr) return;
  const char* next = static_cast<const char*>(recorded->data);
  for (const Written& each : written) {
    if (each.buffer == nullptr) continue;
    uint64_t before;
    std::memcpy(&before, next, sizeof before);
    next += sizeof before;
    PC_EXPECTS(before == reinterpret_cast<uintptr_t>(each.buffer->data), UnsupportedOption, each.name,
               " was copied, because its old contents are used after this write, or because it is sharded; use the "
               "returned array from here on, and jax.shard_map over devices, or pass copy=None to allow the copy");
  }
}

// Replaces each array by its result.
inline void take_results(CallFrame& frame, std::span<Written> written) {
  for (Written& each : written) {
    if (each.buffer != nullptr) each.buffer = &written_result(frame, *each.buffer);
  }
}

// key, value, key_cache, value_cache, slot_mapping, options -> key_cache, value_cache[, key_plane][, value_plane]
inline XLA_FFI_Error* write_kv(XLA_FFI_CallFrame* call) noexcept {
  return serve(call, [](CallFrame& frame, cpu::Failure& failure) {
    WriteArgs args;
    args.key = rows_of(frame.next_argument());
    args.value = rows_of(frame.next_argument());
    const XLA_FFI_Buffer& keys = frame.next_argument();
    const XLA_FFI_Buffer& values = frame.next_argument();
    args.slots = indices_of(&frame.next_argument());
    Options options(frame);
    const CacheView view(frame, options.next(kLayer));
    args.key_scale = scales_of(options.next(kKeyScale), "key_scale", true);
    args.value_scale = scales_of(options.next(kValueScale), "value_scale", true);
    const XLA_FFI_Buffer* key_plane = options.next(kKeyPlane);
    const XLA_FFI_Buffer* value_plane = options.next(kValuePlane);
    Written written[] = {
        {&keys, "key_cache"}, {&values, "value_cache"}, {key_plane, "key_scale"}, {value_plane, "value_scale"}};
    check_addresses(written, options.next(kAddresses));
    take_results(frame, written);
    args.key_cache = view.of(*written[0].buffer, frame.integer("key_format"), written[2].buffer);
    args.value_cache = view.of(*written[1].buffer, frame.integer("value_format"), written[3].buffer);
    args.four_over_six = frame.integer("four_over_six") != 0;
    PC_ASSERT(frame.is_done());
    const PlainArithmetic arithmetic;
    return host.calls->write_kv(args, threads_of_a_call(), failure);
  });
}

// key_cache, value_cache, pairs, options -> `num_written` of key_cache, value_cache and the four planes of sealed
// blocks, from `first_written` on, which `convert` writes.
inline XLA_FFI_Error* convert_sealed(XLA_FFI_CallFrame* call, size_t first_written, size_t num_written,
                                     decltype(cpu::HostCalls::seal_blocks) convert) noexcept {
  return serve(call, [&](CallFrame& frame, cpu::Failure& failure) {
    const XLA_FFI_Buffer& keys = frame.next_argument();
    const XLA_FFI_Buffer& values = frame.next_argument();
    const XLA_FFI_Buffer& pairs = frame.next_argument();
    Options options(frame);
    const XLA_FFI_Buffer* layer = options.next(kLayer);
    const CacheView view(frame, layer);
    const SealedPlanes given = SealedPlanes::next(options);
    Written arrays[] = {{&keys, "key_cache"},
                        {&values, "value_cache"},
                        {given.key, "sealed key"},
                        {given.value, "sealed value"},
                        {given.key_scale, "sealed key_scale"},
                        {given.value_scale, "sealed value_scale"}};
    const std::span<Written> written = std::span(arrays).subspan(first_written, num_written);
    check_addresses(written, options.next(kAddresses));
    take_results(frame, written);
    const SealedPlanes planes = {arrays[2].buffer, arrays[3].buffer, arrays[4].buffer, arrays[5].buffer};
    SealArgs args;
    args.key = view.of(*arrays[0].buffer, 0, nullptr);
    args.value = view.of(*arrays[1].buffer, 0, nullptr);
    args.sealed_key = sealed_keys(planes, layer, frame.integer("key_bits"));
    args.sealed_value = sealed_values(planes, layer, frame.integer("value_bits"));
    args.num_sealed = num_sealed_blocks(planes, layer);
    PC_ASSERT(pairs.rank == 2 && pairs.dims[1] == 2 && frame.is_done());
    const bool wide = is_wide(pairs);
    const int64_t width = wide ? 8 : 4;
    const char* const data = static_cast<const char*>(pairs.data);
    args.sources = {data, pairs.dims[0], 2 * width, wide};
    args.targets = {data + width, pairs.dims[0], 2 * width, wide};
    const PlainArithmetic arithmetic;
    return convert(args, threads_of_a_call(), failure);
  });
}

inline XLA_FFI_Error* seal_kv(XLA_FFI_CallFrame* call) noexcept {
  return convert_sealed(call, 2, 4, host.calls->seal_blocks);
}

inline XLA_FFI_Error* unseal_kv(XLA_FFI_CallFrame* call) noexcept {
  return convert_sealed(call, 0, 2, host.calls->unseal_blocks);
}

// Arrays -> the address of each, as two uint32.
inline XLA_FFI_Error* addresses(XLA_FFI_CallFrame* call) noexcept {
  return serve(call, [](CallFrame& frame, cpu::Failure&) {
    const XLA_FFI_Buffer& result = frame.next_result();
    char* next = static_cast<char*>(result.data);
    while (!frame.is_done()) {
      const uint64_t address = reinterpret_cast<uintptr_t>(frame.next_argument().data);
      std::memcpy(next, &address, sizeof address);
      next += sizeof address;
    }
    return true;
  });
}

}  // namespace pagecore::xla
