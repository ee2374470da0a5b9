// Custom calls of pagecore for XLA on the host. They run on XLA's threads, without a Python interpreter.
//
// The Python side checks shapes and dtypes while it traces, and XLA ensures that buffers have these shapes and dtypes.
// The contents of index arrays and scales are checked here and in the operations, before anything is written. Buffers
// are dense and row-major.
#pragma once

#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#include "pagecore/interop/jax/call_frame.hpp"
#include "pagecore/ops/cpu/host_calls.hpp"

namespace pagecore::xla {

// Set once, before a handler is registered.
struct Host {
  const cpu::HostCalls* calls = nullptr;
  const std::atomic<int64_t>* num_threads = nullptr;
};
inline constinit Host host;

// Optional arguments, after the required ones. The attribute "given" of a call has a bit for each that is present.
enum Optional : int64_t {
  kLayer,
  kRows,
  kCuQueryLens,
  kSinks,
  kAlibiSlopes,
  kMask,
  kTreeMask,
  kPositions,
  kKeyScale,
  kValueScale,
  kKeyPlane,
  kValuePlane,
  kAddresses
};

class Options {
 public:
  explicit Options(CallFrame& frame) : frame_(frame), given_(frame.integer("given")) {}

  // Call in the order of the enumeration.
  [[nodiscard]] const XLA_FFI_Buffer* next(Optional option) {
    return (given_ >> option & 1) != 0 ? &frame_.next_argument() : nullptr;
  }

 private:
  CallFrame& frame_;
  int64_t given_;
};

// ---- buffers as arguments of the operations

[[nodiscard]] inline Float float_type(const XLA_FFI_Buffer& buffer) {
  switch (buffer.dtype) {
    case XLA_FFI_DataType_F32: return Float::F32;
    case XLA_FFI_DataType_F16: return Float::F16;
    case XLA_FFI_DataType_BF16: return Float::BF16;
    default: fail(ErrorKind::Internal, "pagecore is inconsistent: XLA dtype ", buffer.dtype, " is not a float");
  }
}

[[nodiscard]] inline Float stored_type(const XLA_FFI_Buffer& buffer) {
  switch (buffer.dtype) {
    case XLA_FFI_DataType_F8E4M3FN: return Float::F8E4M3FN;
    case XLA_FFI_DataType_F8E5M2: return Float::F8E5M2;
    case XLA_FFI_DataType_S8: return Float::I8;
    case XLA_FFI_DataType_U8: return Float::U8;
    default: return float_type(buffer);
  }
}

[[nodiscard]] inline bool is_wide(const XLA_FFI_Buffer& buffer) {
  PC_ASSERT(buffer.dtype == XLA_FFI_DataType_S64 || buffer.dtype == XLA_FFI_DataType_S32);
  return buffer.dtype == XLA_FFI_DataType_S64;
}

[[nodiscard]] inline TokenArray rows_of(const XLA_FFI_Buffer& buffer) {
  PC_ASSERT(buffer.rank == 3);
  TokenArray rows{static_cast<char*>(buffer.data), float_type(buffer), buffer.dims[0], buffer.dims[1], buffer.dims[2]};
  rows.head_stride = rows.dim * size_of(rows.type);
  rows.token_stride = rows.num_heads * rows.head_stride;
  return rows;
}

[[nodiscard]] inline Indices indices_of(const XLA_FFI_Buffer* buffer) {
  if (buffer == nullptr) return {};
  PC_ASSERT(buffer->rank <= 1);
  const bool wide = is_wide(*buffer);
  return {static_cast<const char*>(buffer->data), buffer->rank == 0 ? 1 : buffer->dims[0], wide ? 8 : 4, wide};
}

// Bits of a tree: int32 [num_tokens, 2 * words], low halves first.
[[nodiscard]] inline cpu::Tree tree_of(const XLA_FFI_Buffer* buffer) {
  if (buffer == nullptr) return {};
  PC_ASSERT(buffer->rank == 2 && !is_wide(*buffer) && buffer->dims[1] % 2 == 0);
  return {static_cast<const uint64_t*>(buffer->data), buffer->dims[1] / 2, {}};
}

[[nodiscard]] inline Table table_of(const XLA_FFI_Buffer& buffer) {
  PC_ASSERT(buffer.rank == 2);
  const bool wide = is_wide(buffer);
  return {static_cast<const char*>(buffer.data), buffer.dims[0], buffer.dims[1], buffer.dims[1] * (wide ? 8 : 4), wide};
}

[[nodiscard]] inline PerHead per_head(const XLA_FFI_Buffer* buffer) {
  if (buffer == nullptr) return {};
  PC_ASSERT(buffer->rank == 1);
  const Float type = float_type(*buffer);
  return {static_cast<const char*>(buffer->data), type, size_of(type)};
}

// Checked float32 scales; an eager call makes the same checks when it reads its arguments.
[[nodiscard]] inline PerHead scales_of(const XLA_FFI_Buffer* buffer, const char* name, bool divides) {
  const PerHead scales = per_head(buffer);
  for (int64_t i = 0; buffer != nullptr && i < buffer->dims[0]; ++i) {
    PC_ASSERT(scales.type == Float::F32);
    const float scale = static_cast<const float*>(buffer->data)[i];
    PC_EXPECTS(std::isfinite(scale) && !(divides && scale == 0.0f), UnsupportedOption, name, " holds ", scale,
               "; as a float32 it must be finite", divides ? ", and not 0 to be divided by" : "");
  }
  return scales;
}

// Axes of cache arrays: [layer,] block, token, head, dim, or with heads before tokens.
class CacheView {
 public:
  CacheView(CallFrame& frame, const XLA_FFI_Buffer* layer)
      : heads_first_(frame.integer("heads_first") != 0), layer_(layer) {}

  // `plane` holds the stored scales of the format; null if it has none.
  [[nodiscard]] Cache of(const XLA_FFI_Buffer& codes, int64_t format, const XLA_FFI_Buffer* plane) const {
    const Strided at = strided(codes);
    Cache cache{at.data, stored_type(codes)};
    cache.format = static_cast<Format>(format);
    cache.num_blocks = at.dims[0];
    cache.block_size = at.dims[heads_first_ ? 2 : 1];
    cache.num_heads = at.dims[heads_first_ ? 1 : 2];
    cache.dim = at.dims[3] * (cache.type == Float::U8 ? 2 : 1);
    cache.block_stride = at.block_stride;
    cache.token_stride = at.token_stride;
    cache.head_stride = at.head_stride;
    if (plane != nullptr) {
      const Strided scales = strided(*plane);
      cache.scales = {scales.data, scales.block_stride, scales.token_stride, scales.head_stride};
    }
    return cache;
  }

 private:
  // One layer of a buffer, with strides in bytes.
  struct Strided {
    char* data;
    const int64_t* dims;
    int64_t block_stride;
    int64_t token_stride;
    int64_t head_stride;
  };

  [[nodiscard]] Strided strided(const XLA_FFI_Buffer& buffer) const {
    PC_ASSERT(buffer.rank == (layer_ == nullptr ? 4 : 5));
    const int64_t* dims = buffer.dims + (layer_ == nullptr ? 0 : 1);
    const int64_t row = dims[3] * size_of(stored_type(buffer)), inner = dims[2] * row;
    Strided at{static_cast<char*>(buffer.data), dims, dims[1] * inner, inner, row};
    if (heads_first_) std::swap(at.token_stride, at.head_stride);
    if (layer_ != nullptr) {
      const int64_t layer = indices_of(layer_).at(0);
      PC_EXPECTS(layer >= 0 && layer < buffer.dims[0], ShapeError, "layer is ", layer, " and the caches hold ",
                 buffer.dims[0], " layers; layers start at 0");
      at.data += layer * dims[0] * at.block_stride;
    }
    return at;
  }

  bool heads_first_;
  const XLA_FFI_Buffer* layer_;  // null: an array holds one layer
};

// ---- custom calls

template <typename Call>
[[nodiscard]] XLA_FFI_Error* serve(XLA_FFI_CallFrame* frame, Call&& call) noexcept {
  if (answered_version(*frame)) return nullptr;
  cpu::Failure failure;
  try {
    CallFrame arguments(*frame);
    if (call(arguments, failure)) return nullptr;
  } catch (const Error& error) {
    failure = {error.kind(), error.what()};
  }
  return make_error(*frame, failure.kind, failure.message);
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
    const CacheView view(frame, options.next(kLayer));
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
    args.key_scale = scales_of(options.next(kKeyScale), "key_scale", false);
    args.value_scale = scales_of(options.next(kValueScale), "value_scale", false);
    args.key = view.of(keys, frame.integer("key_format"), options.next(kKeyPlane));
    args.value = view.of(values, frame.integer("value_format"), options.next(kValuePlane));
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
  int64_t bytes = size_of(stored_type(given));
  for (int64_t i = 0; i < given.rank; ++i) bytes *= given.dims[i];
  std::memcpy(result.data, given.data, static_cast<size_t>(bytes));
  return result;
}

// The arrays that a write changes. A plane of scales is null if the cache has none.
struct Written {
  const XLA_FFI_Buffer* key_cache;
  const XLA_FFI_Buffer* value_cache;
  const XLA_FFI_Buffer* key_scale;
  const XLA_FFI_Buffer* value_scale;

  // Replaces each array by its result.
  void take_results(CallFrame& frame) {
    for (const XLA_FFI_Buffer** each : {&key_cache, &value_cache, &key_scale, &value_scale}) {
      if (*each != nullptr) *each = &written_result(frame, **each);
    }
  }

  // Fails if XLA has copied an array. `recorded` is the result of addresses() before XLA could copy one.
  void check_addresses(const XLA_FFI_Buffer* recorded) const {
    if (recorded == nullptr) return;
    const std::pair<const XLA_FFI_Buffer*, const char*> named[] = {
        {key_cache, "key_cache"}, {value_cache, "value_cache"}, {key_scale, "key_scale"}, {value_scale, "value_scale"}};
    const char* next = static_cast<const char*>(recorded->data);
    for (const auto& [buffer, name] : named) {
      if (buffer == nullptr) continue;
      uint64_t before;
      std::memcpy(&before, next, sizeof before);
      next += sizeof before;
      PC_EXPECTS(before == reinterpret_cast<uintptr_t>(buffer->data), UnsupportedOption, name,
                 " was copied, because its old contents are used after this write, or because it is sharded; use the "
                 "returned array from here on, and jax.shard_map over devices, or pass copy=None to allow the copy");
    }
  }
};

// key, value, key_cache, value_cache, slot_mapping, options -> key_cache, value_cache[, key_plane][, value_plane]
inline XLA_FFI_Error* write_kv(XLA_FFI_CallFrame* call) noexcept {
  return serve(call, [](CallFrame& frame, cpu::Failure& failure) {
    WriteArgs args;
    args.key = rows_of(frame.next_argument());
    args.value = rows_of(frame.next_argument());
    Written written{&frame.next_argument(), &frame.next_argument(), nullptr, nullptr};
    args.slots = indices_of(&frame.next_argument());
    Options options(frame);
    const CacheView view(frame, options.next(kLayer));
    args.key_scale = scales_of(options.next(kKeyScale), "key_scale", true);
    args.value_scale = scales_of(options.next(kValueScale), "value_scale", true);
    written.key_scale = options.next(kKeyPlane);
    written.value_scale = options.next(kValuePlane);
    written.check_addresses(options.next(kAddresses));
    written.take_results(frame);
    args.key_cache = view.of(*written.key_cache, frame.integer("key_format"), written.key_scale);
    args.value_cache = view.of(*written.value_cache, frame.integer("value_format"), written.value_scale);
    args.four_over_six = frame.integer("four_over_six") != 0;
    PC_ASSERT(frame.is_done());
    const PlainArithmetic arithmetic;
    return host.calls->write_kv(args, threads_of_a_call(), failure);
  });
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
