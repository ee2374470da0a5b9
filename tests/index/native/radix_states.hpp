// States of the model of a radix tree: their kinds, and what their eviction order learns. The fields of a state are
// repeated in each cell of its node, see radix_cells.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "tests/index/native/radix_cells.hpp"

namespace pagecore::test {

class ModelStates : public ModelCells {
 public:
  using ModelCells::ModelCells;

 protected:
  [[nodiscard]] ModelEvictionState& state_of(int cell) { return cells.at(cell).eviction[num_components - 1]; }
  [[nodiscard]] bool has_state(int cell) const { return cells.at(cell).state != radix::kNoState; }

  void repeat(int end) {
    for (const int cell : node(end)) state_of(cell) = state_of(end);
  }

  [[nodiscard]] static double deadline(const ModelEvictionState& state) {
    if (state.is_branch) return state.clock + 384 * (1 + std::min(state.hits, 7.0)) * state.after_branch;
    if (state.is_passed) return state.clock + state.after_state;
    return state.clock + state.weight * (state.has_next ? state.after_state : state.after_branch);
  }
  [[nodiscard]] double weight(const ModelEvictionState& state) const {
    const double ended = ended_[state.has_next], reused = std::min(reused_[state.has_next], ended);
    const double share = std::max(1.0, std::floor(256 * reused / ended));
    const double power = std::exp2(std::floor(std::log2(share)));
    return power > 1 && share >= 1.5 * power ? 1.5 * power : power;
  }
  void count_end(const ModelEvictionState& state) {
    if (state.is_branch || state.is_passed || ++ended_[state.has_next] < 256) return;
    ended_[state.has_next] = 128;
    reused_[state.has_next] = std::floor(reused_[state.has_next] / 2);
  }
  void count_reuse(int end) {
    ModelEvictionState& state = state_of(end);
    if (state.is_branch || state.is_passed || state.is_reused) return;
    state.is_reused = true;
    ++reused_[state.has_next];
    repeat(end);
  }
  // The state of a cell leaves the tree with it, or before it.
  void end_state(int cell) {
    count_end(state_of(cell));
    state_of(cell).evicted_after = static_cast<double>(std::ssize(path(cell)));
    repeat(cell);
  }
  // The state of a match, and the deepest evicted one after it.
  void note_reuse(const ModelMatch& match) {
    if (match.state != radix::kNoState) count_reuse(match.path[static_cast<size_t>(match.blocks - 1)]);
    for (auto end = std::ssize(match.path); has_states && end > match.blocks; --end) {
      const int cell = match.path[static_cast<size_t>(end - 1)];
      if (!cells.at(cell).ends_node || state_of(cell).evicted_after != static_cast<double>(end)) continue;
      count_reuse(cell);
      return;
    }
  }

  void set_kind(int cell, bool ModelEvictionState::* kind, bool value, bool has_ended) {
    ModelEvictionState& state = state_of(cell);
    if (state.*kind == value) return;
    if (has_ended) count_end(state);
    state.*kind = value;
    state.is_reused = false;
    state.weight = weight(state);
    repeat(cell);
  }
  // Marks the last state of the path to a cell as before a branch, and those before it.
  void note_branch(int cell) {
    while (cell >= 0 && !has_state(cell)) cell = cells.at(cell).parent;
    if (cell < 0) return;
    set_kind(cell, &ModelEvictionState::is_branch, true, true);
    pass_states(cell);
  }
  void pass_states(int cell) {
    for (cell = cells.at(cell).parent; cell >= 0; cell = cells.at(cell).parent) {
      if (!has_state(cell)) continue;
      if (state_of(cell).is_branch || state_of(cell).is_passed) return;
      set_kind(cell, &ModelEvictionState::is_passed, true, true);
    }
  }
  // True if the path from a cell to `below` branches before the next state.
  [[nodiscard]] bool has_branch(int cell, int below) const {
    bool found = false;
    for (; below != cell; below = cells.at(below).parent)
      found = !has_state(below) && (found || cells.at(below).children.size() > 1);
    return found || cells.at(cell).children.size() > 1;
  }
  // Gives a cell a state that has just begun; the path of its insertion ends with `below`.
  void place_state(int cell, const ModelEvictionState& fresh, int below) {
    const auto end = static_cast<double>(std::ssize(path(cell)));
    ModelEvictionState mine = fresh;
    mine.weight = weight(mine);
    mine.is_branch = has_branch(cell, below);
    mine.after_state = mine.after_branch = end;
    bool is_last = true;
    for (int above = cells.at(cell).parent; above >= 0; above = cells.at(above).parent) {
      if (!has_state(above)) continue;
      const double since = end - static_cast<double>(std::ssize(path(above)));
      if (is_last) {
        mine.after_state = since;
        set_kind(above, &ModelEvictionState::has_next, true, state_of(above).is_reused);
        if (state_of(above).is_branch && !has_branch(above, cells.at(cell).parent))
          set_kind(above, &ModelEvictionState::is_branch, false, true);
        is_last = false;
      }
      if (!state_of(above).is_branch) continue;
      mine.after_branch = since;
      break;
    }
    state_of(cell) = mine;
    repeat(cell);
    if (mine.is_branch) pass_states(cell);
  }

 private:
  std::array<double, 2> ended_{16, 16}, reused_{10, 3};  // of states that continue a sequence, and with a later one
};

}  // namespace pagecore::test
