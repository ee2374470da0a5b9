// Options of the instances of attention kernels. Code of options that an instance does not serve is not compiled into
// it, because it takes registers even where no call uses it.
#pragma once

namespace pagecore {

// Products times the scale; keys that a query does not attend to occur only at the edges of the key range. Chunks and
// attention sinks are served by every instance.
struct Plain {
  static constexpr bool kFull = false;      // softcap, ALiBi, masks
  static constexpr bool kTree = false;      // trees of new tokens
  static constexpr bool kSelected = false;  // key heads select blocks or tokens
  static constexpr bool kSinks = true;      // sink tokens
  // Variants of prefill.cu, for comparison on a GPU; use_prefill_variant selects one by name.
  static constexpr bool kSlotsFirst = false;  // load all slots of a tile before the first copy
  static constexpr bool kWholeTile = false;   // hold the scores of a whole tile, not of one half at a time
};
struct SlotsFirst : Plain {
  static constexpr bool kSlotsFirst = true;
};
struct WholeTile : Plain {
  static constexpr bool kWholeTile = true;
};
struct SlotsFirstWholeTile : Plain {
  static constexpr bool kSlotsFirst = true;
  static constexpr bool kWholeTile = true;
};
struct Full : Plain {
  static constexpr bool kFull = true;
  static constexpr bool kTree = true;
};
// Calls with a selection have neither a tree nor sink tokens.
struct Selected : Plain {
  static constexpr bool kSelected = true;
  static constexpr bool kSinks = false;
};
struct SelectedFull : Selected {
  static constexpr bool kFull = true;
};
// Latent caches.
struct Latent : Plain {
  static constexpr bool kSinks = false;
};

}  // namespace pagecore

// The manifest names instances by these.
using pagecore::Full;
using pagecore::Plain;
using pagecore::Selected;
using pagecore::SelectedFull;
using pagecore::SlotsFirst;
using pagecore::SlotsFirstWholeTile;
using pagecore::WholeTile;
