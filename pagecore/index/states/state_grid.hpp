// Lengths at which a sequence keeps a checkpoint of its recurrent state.
//
//   prefill   before + k * chunk, the last such length that is a multiple of the block size: the kernel has a state
//             after each chunk of its tokens, and the prefix tree keeps states between blocks
//   branch    a prefill that passes the end of the keys and values that the sequence shares keeps its checkpoint before
//             that end instead, because other sequences branch off there
//   end       a prefill that passes the last block that an equal sequence could find keeps its checkpoint before that
//             instead, unless there is none after `before`: an equal sequence computes at least its last token
//   short     a step that ends at a multiple of lcm(chunk, block size) keeps the state after its last token: parts of a
//             prompt that are shorter than a chunk keep checkpoints, too
//   decode    multiples of lcm(chunk, block size, interval)
//
// With a `delay`, the prefix tree takes a checkpoint once `delay` more tokens are computed. A row keeps its newest
// checkpoint alone, so that the grid is coarser: a prefill keeps its checkpoint that much before its end, and a decode
// step at multiples that are further apart than the delay. A prefill that ends before that keeps one at still wider
// distances, because each may compute up to `delay` tokens and the grid's step.
//
// A step of at most 1 + draft_tokens tokens is a decode step; one that ends before the last block that an equal
// sequence could find is a part of a prompt, and keeps the state at its end as above.
#pragma once

#include <algorithm>
#include <numeric>

#include "pagecore/index/divider.hpp"
#include "pagecore/native/checks.hpp"
#include "pagecore/native/ids.hpp"

namespace pagecore {

class StateGrid {
 public:
  StateGrid(int64_t chunk, int64_t interval, int64_t block_size, int64_t draft_tokens, int64_t delay = 0)
      : chunk_(checked("chunk", chunk, 1)),
        block_(checked("the least common multiple of the block sizes", block_size, 1)),
        drafts_(checked("draft_tokens", draft_tokens, 0)),
        delay_(checked("delay", delay, 0)) {
    PC_EXPECTS(drafts_ <= kMaxDrafts, ShapeError, "draft_tokens is ", draft_tokens, "; use at most ", kMaxDrafts);
    PC_EXPECTS(checked("interval", interval, 1) % chunk == 0, ShapeError, "interval is ", interval,
               ", which is not a multiple of the chunk of ", chunk, " tokens; use a multiple");
    decode_ = std::lcm(block_, interval);  // the interval is a multiple of the chunk
    if (delay_ > 0) decode_ = past(delay_ + drafts_);
    if (decode_ <= kMaxSize) decode_size_ = Divider(static_cast<TokenCount>(decode_));
    const int64_t prefill = std::lcm(chunk_, block_);
    has_ends_ = delay_ == 0 && prefill <= kMaxSize;
    if (has_ends_) prefill_size_ = Divider(static_cast<TokenCount>(prefill));
    const int64_t wide = past(2 * delay_ + prefill);
    if (wide <= kMaxSize) wide_size_ = Divider(static_cast<TokenCount>(wide));
    has_wide_ = delay_ > 0 && wide <= kMaxSize;
  }

  [[nodiscard]] int32_t draft_tokens() const { return static_cast<int32_t>(drafts_); }
  [[nodiscard]] bool is_decode(TokenCount count) const { return count <= 1 + drafts_; }

  // The checkpoint of a step from `before` tokens to `before + count`; 0 for none. Others share the sequence up to
  // `branch` tokens, and an equal sequence could find it up to `end` tokens.
  [[nodiscard]] TokenCount checkpoint(TokenCount before, TokenCount count, TokenCount branch, TokenCount end) const {
    if (is_decode(count)) {
      const bool is_part = end < kMaxSize && before + count <= end;
      return is_part && keeps_end(before, count) ? before + count : in_decode(before, count);
    }
    const auto whole = static_cast<TokenCount>(std::max<int64_t>(count - delay_, 0));
    TokenCount kept = 0;
    for (const TokenCount last : {branch, end}) {
      if (kept == 0 && last > before) kept = last_up_to(before, std::min(whole, last - before), count);
    }
    if (kept == 0) kept = last_up_to(before, whole, count);
    if (kept > 0 || !has_wide_) return kept;
    const TokenCount last = last_multiple(wide_size_, before, count);
    // The kernel also has the state after its last token.
    return (last - before) % chunk_ == 0 || last == before + count ? last : 0;
  }
  // The checkpoint of a decode step of which `accepted` tokens stay; 0 for none.
  [[nodiscard]] TokenCount in_decode(TokenCount before, TokenCount accepted) const {
    if (decode_ > kMaxSize) return 0;
    return last_multiple(decode_size_, before, accepted);
  }

 private:
  static constexpr int64_t kMaxDrafts = 1023;
  static constexpr int64_t kMaxSize = INT32_MAX;

  static int64_t checked(const char* name, int64_t value, int64_t least) {
    PC_EXPECTS(value >= least && value <= kMaxSize, ShapeError, name, " is ", value, "; use ", least, " to ", kMaxSize);
    return value;
  }

  // The least multiple of `decode_` that is greater than `distance`.
  [[nodiscard]] int64_t past(int64_t distance) const { return (distance / decode_ + 1) * decode_; }

  [[nodiscard]] static TokenCount last_multiple(const Divider& size, TokenCount before, TokenCount count) {
    const TokenCount last = size.floor(before + count) * size.divisor();
    return last > before ? last : 0;
  }

  // True if the end of a step is a checkpoint, whatever chunks it has.
  [[nodiscard]] bool keeps_end(TokenCount before, TokenCount count) const {
    return has_ends_ && last_multiple(prefill_size_, before, count) == before + count;
  }

  // The last checkpoint of a prefill step of `count` tokens that has up to `most` of them before it; 0 for none.
  [[nodiscard]] TokenCount last_up_to(TokenCount before, TokenCount most, TokenCount count) const {
    return most == count && keeps_end(before, count) ? before + count : in_prefill(before, most);
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
  int64_t delay_;
  int64_t decode_;
  bool has_ends_ = false;
  bool has_wide_ = false;
  Divider prefill_size_{1};
  Divider decode_size_{1};
  Divider wide_size_{1};
};

}  // namespace pagecore
