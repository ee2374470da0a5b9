// Instances of decode_stored and prefill_stored, and launch shapes of decode_stored (decode.cu), for the kernel and for
// the code that launches it.
#pragma once

#include "cuda_src/abi/formats.h"
#include "cuda_src/shapes/attention.h"

// The instance of decode_stored, or of prefill_stored, that serves a call.
struct PcStoredKernel {
  PcFloat type;  // of the products
  int bits;      // of a code
  int dim;       // 0: no instance serves the call
};

// True if the codes of rows of `dim` numbers consist of whole units of cp.async, 16 bytes.
constexpr bool pc_has_whole_codes(PcFormat format, int dim) {
  return dim % (pc_is_packed(format) ? 32 : 16) == 0 && (pc_group_of(format) == 0 || dim % pc_group_of(format) == 0);
}

// True if the scales of the rows consist of whole units too, 4 bytes.
constexpr bool pc_has_whole_units(PcFormat format, int dim) {
  return pc_has_whole_codes(format, dim) && pc_scale_bytes(format, dim) % 4 == 0;
}

// True for formats with UE8M0 scales, which exceed the range of halves.
constexpr bool pc_has_wide_scales(PcFormat format) { return format == PC_FP4_BLOCK16 || format == PC_MXFP8; }

// Dims that an instance for up to `dim` dims computes with.
constexpr int pc_stored_dim(int dim) { return dim <= 64 ? 64 : dim <= 128 ? 128 : 256; }

// Codes become halves, which hold them exactly; UE8M0 scales exceed halves, so that such codes become bfloat16, and
// queries must be bfloat16 too. Queries of bfloat16 are otherwise converted to halves, each row times a power of two.
// UE8M0 formats have no instance for 256 dims: it would spill on sm_80.
constexpr PcStoredKernel pc_stored_kernel(PcFormat key, PcFormat value, PcFloat query_type, int head_dim,
                                          int value_dim) {
  const bool wide = pc_has_wide_scales(key);
  const int larger = head_dim > value_dim ? head_dim : value_dim;
  const bool serves = key == value && key != PC_PLAIN && query_type != PC_FLOAT32 &&
                      (!wide || query_type == PC_BFLOAT16) && larger <= (wide ? 128 : pc_max_matrix_dim) &&
                      pc_has_whole_units(key, head_dim) && pc_has_whole_units(key, value_dim);
  return {wide ? PC_BFLOAT16 : PC_FLOAT16, pc_is_packed(key) ? 4 : 8, serves ? pc_stored_dim(larger) : 0};
}

// The instance of prefill_stored. Codes of keys and of values must have the same bits; their formats may differ.
// Products are of the query's type: bfloat16 holds every code exactly, and every UE8M0 scale.
constexpr PcStoredKernel pc_prefill_stored_kernel(PcFormat key, PcFormat value, PcFloat query_type, int head_dim,
                                                  int value_dim) {
  const bool wide = pc_has_wide_scales(key) || pc_has_wide_scales(value);
  const int larger = head_dim > value_dim ? head_dim : value_dim;
  const bool serves = key != PC_PLAIN && value != PC_PLAIN && pc_is_packed(key) == pc_is_packed(value) &&
                      query_type != PC_FLOAT32 && (!wide || query_type == PC_BFLOAT16) && larger <= pc_max_matrix_dim &&
                      pc_has_whole_codes(key, head_dim) && pc_has_whole_codes(value, value_dim);
  return {query_type, pc_is_packed(key) ? 4 : 8, serves ? pc_stored_dim(larger) : 0};
}

// Shared memory of decode_stored, by the fields of PcRingShape:
//
//   ring of a warp     [stages][key codes, value codes, key scales, value scales]; 48 KiB for a CTA
//   queries            [16, dim] of 16 bits, then for each warp a tile of keys and one of values, unpacked
//   weights of a warp  addresses of the scales of 16 tokens; after those of all warps: factors of 16 rows
//
// At the end of an item, O of a warp overwrites its unpacked tiles.
struct PcStoredShape {
  int bits;
  int dim;

  constexpr int code_bytes() const { return dim * bits / 8; }  // of a row
  constexpr int scale_bytes() const { return dim / 16; }       // of a row, at least one word
  constexpr int stage_bytes() const { return 2 * 16 * (code_bytes() + scale_bytes()); }
  constexpr int warps() const { return dim <= 128 ? 4 : 2; }
  constexpr int stages() const { return bits == 8 ? 3 : 6; }
  constexpr int tile_bytes() const { return 16 * pc_row_bytes(dim); }  // of unpacked keys, or of unpacked values

  constexpr PcRingShape ring() const {
    const int weight_bytes = 16 * 16 + 16 * 4 / warps();
    return {warps(), stages(), stage_bytes(), 16, 16, 16, tile_bytes() * (1 + 2 * warps()), weight_bytes, 0};
  }
};

constexpr PcLaunchShape pc_stored_shape(int bits, int dim) {
  const PcRingShape ring = PcStoredShape{bits, dim}.ring();
  return {ring.warps * 32, ring.bytes(), 2, ring.warp_rows, ring.warps * ring.tile_tokens};
}

static_assert(pc_stored_shape(8, 64).shared_bytes <= 99 * 1024 && pc_stored_shape(4, 64).shared_bytes <= 99 * 1024,
              "every architecture provides 99 KiB");
static_assert(pc_stored_shape(8, 128).shared_bytes <= 99 * 1024 && pc_stored_shape(4, 128).shared_bytes <= 99 * 1024,
              "every architecture provides 99 KiB");
static_assert(pc_stored_shape(8, 256).shared_bytes <= 99 * 1024 && pc_stored_shape(4, 256).shared_bytes <= 99 * 1024,
              "every architecture provides 99 KiB");
