// Collectives of a warp: shuffles, votes and matrices. The operands of the lanes are on their stacks.
#include <algorithm>
#include <cstring>

#include "block.hpp"
#include "numbers.hpp"

namespace emulator {

namespace {

struct Exchange {
  uint32_t value;
  int operand;
  uint32_t result;
};

template <Shuffle kKind>
int source_of(int lane, int operand) {
  switch (kKind) {
    case Shuffle::exclusive_or: return lane ^ operand;
    case Shuffle::from_lane: return operand & (kLanes - 1);
    case Shuffle::up: return lane - operand;
  }
}

template <Shuffle kKind>
void exchange(const void* const (&operands)[kLanes]) {
  for (int lane = 0; lane < kLanes; ++lane) {
    Exchange& own = *static_cast<Exchange*>(const_cast<void*>(operands[lane]));
    const int from = source_of<kKind>(lane, own.operand);
    own.result = static_cast<const Exchange*>(operands[from < 0 || from >= kLanes ? lane : from])->value;
  }
}

template <Shuffle kKind>
uint32_t shuffle_by(const char* name, uint32_t value, int operand, Site site) {
  Exchange own{value, operand, 0};
  meet(name, &own, exchange<kKind>, site);
  return own.result;
}

struct Vote {
  bool condition;
  uint32_t result;
};

void count_votes(const void* const (&operands)[kLanes]) {
  uint32_t votes = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    votes |= static_cast<uint32_t>(static_cast<const Vote*>(operands[lane])->condition) << lane;
  }
  for (const void* operand : operands) static_cast<Vote*>(const_cast<void*>(operand))->result = votes;
}

struct Loading {
  uint32_t (&r)[4];
  uint32_t row;
  Site site;
};

// Returns the number of extra passes that 32 banks of 4 bytes need for 8 rows. A row that occurs twice is read once.
int count_conflicts(const uint32_t (&rows)[8]) {
  uint32_t banks = 0;
  for (const uint32_t row : rows) banks |= 1u << row / 16 % 8;
  if (banks == 0xff) return 0;
  int most = 1;
  for (int i = 0; i < 8; ++i) {
    int same_banks = 0;
    for (int j = 0; j < 8; ++j) {
      const bool seen = std::find(rows, rows + j, rows[j]) != rows + j;
      if (!seen && rows[j] / 16 % 8 == rows[i] / 16 % 8) ++same_banks;
    }
    most = std::max(most, same_banks);
  }
  return most - 1;
}

template <bool kTransposed>
void load(const void* const (&operands)[kLanes]) {
  const int own_lane = place.lane;
  for (int m = 0; m < 4; ++m) {
    uint16_t matrix[8][8];
    uint32_t rows[8];
    for (int row = 0; row < 8; ++row) {
      const Loading& loading = *static_cast<const Loading*>(operands[m * 8 + row]);
      act_as_lane(m * 8 + row);
      rows[row] = loading.row;
      std::memcpy(matrix[row], read_row(loading.row, loading.site), sizeof(matrix[row]));
    }
    ++counts.matrix_loads;
    counts.matrix_conflicts += static_cast<uint64_t>(count_conflicts(rows));
    for (int lane = 0; lane < kLanes; ++lane) {
      const int i = lane / 4;
      const int j = lane % 4 * 2;
      const uint32_t low = kTransposed ? matrix[j][i] : matrix[i][j];
      const uint32_t high = kTransposed ? matrix[j + 1][i] : matrix[i][j + 1];
      static_cast<const Loading*>(operands[lane])->r[m] = low | high << 16;
    }
  }
  act_as_lane(own_lane);
}

using RowOfB = float __attribute__((vector_size(8 * sizeof(float))));

struct Product {
  float (&c)[4];
  const uint32_t (&a)[4];
  uint32_t b0;
  uint32_t b1;
};

template <float (*kFloat)(uint16_t)>
void multiply_warp(const void* const (&operands)[kLanes]) {
  uint16_t bits_of_a[16 * 16];
  uint16_t bits_of_b[16 * 8];
  RowOfB c[16];
  for (int lane = 0; lane < kLanes; ++lane) {
    const Product& own = *static_cast<const Product*>(operands[lane]);
    const int g = lane / 4;
    const int q = lane % 4 * 2;
    for (int i = 0; i < 4; ++i) {
      const int row = g + i % 2 * 8;
      const int column = q + i / 2 * 8;
      bits_of_a[row * 16 + column] = static_cast<uint16_t>(own.a[i]);
      bits_of_a[row * 16 + column + 1] = static_cast<uint16_t>(own.a[i] >> 16);
      c[g + i / 2 * 8][q + i % 2] = own.c[i];
    }
    for (int i = 0; i < 4; ++i) {
      bits_of_b[(q + i / 2 * 8 + i % 2) * 8 + g] = static_cast<uint16_t>((i < 2 ? own.b0 : own.b1) >> i % 2 * 16);
    }
  }
  float a[16 * 16];
  float numbers_of_b[16 * 8];
  for (int i = 0; i < 16 * 16; ++i) a[i] = kFloat(bits_of_a[i]);
  for (int i = 0; i < 16 * 8; ++i) numbers_of_b[i] = kFloat(bits_of_b[i]);
  RowOfB b[16];
  std::memcpy(b, numbers_of_b, sizeof(b));
  for (int i = 0; i < 16; ++i) {
    RowOfB sum = c[i];
    for (int k = 0; k < 16; ++k) sum += a[i * 16 + k] * b[k];
    c[i] = sum;
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const Product& own = *static_cast<const Product*>(operands[lane]);
    for (int i = 0; i < 4; ++i) own.c[i] = c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
  }
}

}  // namespace

uint32_t shuffle(Shuffle kind, uint32_t value, int operand, Site site) {
  switch (kind) {
    case Shuffle::exclusive_or: return shuffle_by<Shuffle::exclusive_or>("pc_shuffle_xor", value, operand, site);
    case Shuffle::from_lane: return shuffle_by<Shuffle::from_lane>("pc_shuffle", value, operand, site);
    case Shuffle::up: return shuffle_by<Shuffle::up>("pc_shuffle_up", value, operand, site);
  }
  return 0;
}

uint32_t ballot(bool condition, Site site) {
  Vote own{condition, 0};
  meet("pc_ballot", &own, count_votes, site);
  return own.result;
}

void load_matrices(uint32_t (&r)[4], uint32_t row, bool transposed, Site site) {
  const Loading own{r, row, site};
  if (transposed) {
    meet("pc_load_matrices_transposed", &own, load<true>, site);
  } else {
    meet("pc_load_matrices", &own, load<false>, site);
  }
}

void multiply(MatrixType type, float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Site site) {
  const Product own{c, a, b0, b1};
  meet("pc_multiply", &own, type == MatrixType::half ? multiply_warp<float_of_half> : multiply_warp<float_of_bfloat16>,
       site);
}

}  // namespace emulator
