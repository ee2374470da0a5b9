// Launch shapes of latent.cu and general_latent.cu, for the kernels and for the code that launches them.
#pragma once

#include "cuda_src/abi/latent.h"
#include "cuda_src/shapes/attention.h"

// The instance of latent.cu that serves a call.
struct PcLatentKernel {
  PcFloat type;  // of the products
  int dim;       // of latents; 0: no instance serves the call
};

constexpr int pc_latent_rope_dim = 64;

// Codes become elements of the queries' type. Only bfloat16 holds the products of fp8_ds_mla with their scales.
constexpr PcLatentKernel pc_latent_kernel(PcLatentFormat format, PcFloat query_type, PcFloat type, int latent_dim,
                                          int rope_dim) {
  const bool has_type = format == PC_LATENT_PLAIN    ? type == query_type && type != PC_FLOAT32
                        : format == PC_LATENT_FP8_DS ? query_type == PC_BFLOAT16
                                                     : query_type != PC_FLOAT32;
  const bool has_dims = rope_dim == pc_latent_rope_dim && (latent_dim == 512 || latent_dim == 256);
  return {query_type, has_type && has_dims ? latent_dim : 0};
}

// Bytes of a row in the cache: of plain 16-bit numbers, or of codes.
constexpr int pc_latent_row_bytes(PcLatentFormat format, int latent_dim) {
  const int numbers = latent_dim + pc_latent_rope_dim;
  return format == PC_LATENT_PLAIN    ? 2 * numbers
         : format == PC_LATENT_E4M3   ? numbers
         : format == PC_LATENT_FP8_DS ? static_cast<int>(PC_FP8_ROW_BYTES)
                                      : static_cast<int>(PC_NVFP4_ROW_BYTES);
}

// Shared memory of latent.cu, for items of up to `rows` packed rows: 16 or 32.
//
//   ring       [stages][16 rows of the cache]
//   tiles      [2][16, latent_dim + 64] of 16 bits: unpacked rows of codes; absent for plain rows
//   products   [parts][rows, 16] float32: parts of scores
//   slots      [16]: addresses of the latent and of the rope of a token
//   walks      of each warp: WalkState
//   ranges     [rows]: keys of each row
//   listed     [stages][16] bytes: 0 for a token that a list skips
//   folds      [2][rows]: largest lse and sum of the pieces that have been folded
//   flag       one word, padded to 16 bytes
struct PcLatentShape {
  PcLatentFormat format;
  int latent_dim;
  int rows;

  static constexpr int kTokens = 16;  // of a tile
  static constexpr int kParts = 4;    // warps that share the rows of a group
  static constexpr int kStages = 4;

  constexpr int groups() const { return rows / 16; }
  constexpr int warps() const { return kParts * groups(); }
  constexpr int tile_bytes() const { return kTokens * 2 * (latent_dim + pc_latent_rope_dim); }
  constexpr int stage_bytes() const { return kTokens * pc_latent_row_bytes(format, latent_dim); }
  constexpr int tiles_begin() const { return kStages * stage_bytes(); }
  constexpr int products_begin() const { return tiles_begin() + (format == PC_LATENT_PLAIN ? 0 : 2 * tile_bytes()); }
  constexpr int slots_begin() const { return products_begin() + kParts * rows * kTokens * 4; }
  constexpr int walks_begin() const { return slots_begin() + kTokens * PcRingShape::kSlotBytes; }
  constexpr int ranges_begin() const { return walks_begin() + warps() * PcRingShape::kWalkBytes; }
  constexpr int listed_begin() const { return ranges_begin() + rows * 8; }
  constexpr int folds_begin() const { return listed_begin() + kStages * kTokens; }
  constexpr int flag_begin() const { return folds_begin() + 2 * rows * 8; }
  constexpr int bytes() const { return flag_begin() + 16; }
};

constexpr PcLaunchShape pc_latent_shape(PcLatentFormat format, int latent_dim, int rows) {
  const PcLatentShape shape = {format, latent_dim, rows};
  return {shape.warps() * 32, shape.bytes(), rows == 16 ? 2 : 1, rows, PcLatentShape::kTokens};
}

constexpr bool pc_latent_fits(PcLatentFormat format, int rows) {
  return pc_latent_shape(format, 512, rows).shared_bytes <= 99 * 1024;
}

static_assert(pc_latent_fits(PC_LATENT_PLAIN, 16) && pc_latent_fits(PC_LATENT_PLAIN, 32),
              "every architecture provides 99 KiB");
static_assert(pc_latent_fits(PC_LATENT_FP8_DS, 16) && pc_latent_fits(PC_LATENT_FP8_DS, 32),
              "every architecture provides 99 KiB");

// general_latent.cu: any dims of which the latent has at most pc_max_general_latent numbers, and latent and rope
// together pc_max_general_row, each padded to a multiple of 4.
constexpr int pc_max_general_latent = 1024;
constexpr int pc_max_general_row = 1280;

struct PcGeneralLatentShape {
  int latent_dim;
  int rope_dim;

  static constexpr int kThreads = 128;
  static constexpr int kRows = 8;    // packed rows of a CTA
  static constexpr int kTokens = 8;  // of a tile

  constexpr int rope_begin() const { return (latent_dim + 3) / 4 * 4; }  // of a row in shared memory
  // Elements from a row to the next: 4 more than a multiple of 32 or an odd multiple of 4, so that the rows of a column
  // are in different banks.
  constexpr int pitch() const { return (rope_begin() + (rope_dim + 3) / 4 * 4 + 7) / 8 * 8 + 4; }
  constexpr int keys_begin() const { return kRows * pitch() * 4; }
  constexpr int slots_begin() const { return keys_begin() + kTokens * pitch() * 4; }
  constexpr int weights_begin() const { return slots_begin() + kTokens * PcRingShape::kSlotBytes; }  // [tokens][rows]
  constexpr int rescale_begin() const { return weights_begin() + kRows * kTokens * 4; }              // [rows]
  constexpr int sums_begin() const { return rescale_begin() + kRows * 4; }      // [rows]: largest score, and sum
  constexpr int folds_begin() const { return sums_begin() + kRows * 8; }        // [2][rows]: largest lse, and sum
  constexpr int ranges_begin() const { return folds_begin() + 2 * kRows * 8; }  // [rows]
  constexpr int flag_begin() const { return ranges_begin() + kRows * 8; }
  constexpr int bytes() const { return flag_begin() + 16; }
};

constexpr PcLaunchShape pc_general_latent_shape(int latent_dim, int rope_dim) {
  return {PcGeneralLatentShape::kThreads, PcGeneralLatentShape{latent_dim, rope_dim}.bytes(), 2,
          PcGeneralLatentShape::kRows, PcGeneralLatentShape::kTokens};
}

static_assert(pc_general_latent_shape(1024, 256).shared_bytes <= 99 * 1024, "every architecture provides 99 KiB");

// Row tiles of an item of `num_rows` packed rows.
constexpr int pc_latent_tiles(int num_rows, int rows) { return (num_rows + rows - 1) / rows; }
// The largest number of row tiles of any item: items have up to 128 packed rows, and always those of a query.
constexpr int pc_max_latent_tiles(int num_heads) {
  return pc_latent_tiles(num_heads > 128 ? num_heads : 128, PcGeneralLatentShape::kRows);
}
