// Who uses the tiles of AMX. With PC_AMX_EMULATED they are emulated, on any machine that has the rest of the level.
#pragma once

#include "pagecore/ops/cpu/kernels/amx.hpp"
#if defined(PC_AMX_EMULATED)
#include "pagecore/ops/cpu/kernels/amx_emulated.hpp"
#endif

namespace pagecore::cpu::PC_ISA {
namespace {

#if defined(PC_AMX_EMULATED)
using Amx = EmulatedTiles;
#else
using Amx = HardwareTiles;
#endif

// Holds this thread's tiles as long as it lives: 0 .. 3 are sums, 4 and 5 left sides, 6 and 7 right sides. No other may
// live in the thread meanwhile.
class Tiles {
 public:
  Tiles() { configure(kTileRows); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
  ~Tiles() { Amx::release(); }

  // How many rows left sides and sums have; what tiles hold is lost where that changes.
  PC_FORCE_INLINE void set_rows(int rows) {
    if (rows != rows_) configure(rows);
  }

 private:
  void configure(int rows) {
    TileConfig config;
    config.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      config.row_bytes[tile] = kTileBytes;
      config.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows : kTileRows);
    }
    Amx::configure(config);
    rows_ = rows;
  }

  int rows_ = 0;
};

}  // namespace
}  // namespace pagecore::cpu::PC_ISA
