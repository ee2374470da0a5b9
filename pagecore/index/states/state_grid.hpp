// Lengths at which a sequence keeps a checkpoint of its recurrent state.
//
//   prefill   before + k * chunk, the last such length that is a multiple of the block size: the kernel has a state
//             after each chunk of its tokens, and the prefix tree keeps states between blocks
//   branch    a prefill that passes the end of the keys and values that the sequence shares keeps its checkpoint before
//             that end instead, because other sequences branch off there
//   decode    multiples of lcm(chunk, block size, interval)
//
// A step of at most 1 + draft_tokens tokens is a decode step.
#pragma once

#include <algorithm>
#include <numeric>

#include "pagecore/index/divider.hpp"
#include "pagecore/native/checks.hpp"
#include "pagecore/native/ids.hpp"

namespace pagecore {

class StateGrid {
 public:
  StateGrid(int64_t chunk, int64_t interval, int64_t block_size, int64_t draft_tokens)
      : chunk_(checked("chunk", chunk, 1)),
        block_(checked("the least common multiple of the block sizes", block_size, 1)),
        drafts_(checked("draft_tokens", draft_tokens, 0)) {
    PC_EXPECTS(drafts_ <= kMaxDrafts, ShapeError, "draft_tokens is ", draft_tokens, "; use at most ", kMaxDrafts);
    PC_EXPECTS(checked("interval", interval, 1) % chunk == 0, ShapeError, "interval is ", interval,
               ", which is not a multiple of the chunk of ", chunk, " tokens; use a multiple");
    decode_ = std::lcm(block_, interval);  // the interval is a multiple of the chunk
    if (decode_ <= kMaxSize) decode_size_ = Divider(static_cast<TokenCount>(decode_));
  }

  [[nodiscard]] int32_t draft_tokens() const { return static_cast<int32_t>(drafts_); }
  [[nodiscard]] bool is_decode(TokenCount count) const { return count <= 1 + drafts_; }

  // The checkpoint of a step from `before` tokens to `before + count`; 0 for none. Others share the sequence up to
  // `branch` tokens.
  [[nodiscard]] TokenCount checkpoint(TokenCount before, TokenCount count, TokenCount branch) const {
    if (is_decode(count)) return in_decode(before, count);
    const TokenCount shared = branch > before ? in_prefill(before, std::min(count, branch - before)) : 0;
    return shared > 0 ? shared : in_prefill(before, count);
  }
  // The checkpoint of a decode step of which `accepted` tokens stay; 0 for none.
  [[nodiscard]] TokenCount in_decode(TokenCount before, TokenCount accepted) const {
    if (decode_ > kMaxSize) return 0;
    const TokenCount size = decode_size_.divisor(), last = decode_size_.floor(before + accepted) * size;
    return last > before ? last : 0;
  }

 private:
  static constexpr int64_t kMaxDrafts = 1023;
  static constexpr int64_t kMaxSize = INT32_MAX;

  static int64_t checked(const char* name, int64_t value, int64_t least) {
    PC_EXPECTS(value >= least && value <= kMaxSize, ShapeError, name, " is ", value, "; use ", least, " to ", kMaxSize);
    return value;
  }

  [[nodiscard]] TokenCount in_prefill(TokenCount before, TokenCount count) const {
    // The remainders of before + k * chunk repeat after block / gcd values of k.
    const int64_t chunks = count / chunk_, first = chunks - block_ / std::gcd(chunk_, block_);
    for (int64_t k = chunks; k > 0 && k > first; --k) {
      if ((before + k * chunk_) % block_ == 0) return static_cast<TokenCount>(before + k * chunk_);
    }
    return 0;
  }

  int64_t chunk_;
  int64_t block_;
  int64_t drafts_;
  int64_t decode_;
  Divider decode_size_{1};
};

}  // namespace pagecore
