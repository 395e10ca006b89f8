// Sums of partial products on threads of the host, with their epilogues, and bias gradients,
// against the CPU's results.
#include <cmath>
#include <random>

#include "device.h"
#include "gemm/comm_overlap.h"
#include "kernels/product.h"
#include "native_test.h"

namespace cpd::kernels::test_sum_kernels {

std::mt19937 rng(0);

template <typename T>
std::vector<T> Random(int64_t count) {
  std::vector<T> values(count);
  for (T& value : values) {
    value = Round<T>(static_cast<float>(static_cast<int>(rng() % 2001) - 1000) / 300);
  }
  return values;
}

template <typename T>
constexpr DataType kTypeOf = DataType::kF32;
template <>
constexpr DataType kTypeOf<BF16> = DataType::kBF16;
template <>
constexpr DataType kTypeOf<F16> = DataType::kF16;

template <typename T>
const char* Data(const std::vector<T>& values) {
  return reinterpret_cast<const char*>(values.data());
}
template <typename T>
char* Data(std::vector<T>* values) {
  return reinterpret_cast<char*>(values->data());
}

// Bit for bit what the CPU computes.
template <typename In, typename Out>
void SumsAreThoseOfTheCpu(bool has_bias, int64_t pitch) {
  constexpr int64_t kRows = 5, kColumns = 37, kParts = 3;
  std::vector<std::vector<In>> parts;
  for (int i = 0; i < kParts; ++i) parts.push_back(Random<In>(kRows * pitch));
  const auto bias = Random<Out>(kColumns);
  std::vector<Out> expected(kRows * pitch), got(kRows * pitch);
  SumTask task;
  SumCall call{};
  for (int i = 0; i < kParts; ++i) {
    task.sources.push_back(Data(parts[i]));
    call.sources[i] = Data(parts[i]);
  }
  call.num_sources = kParts;
  task.type = call.type = kTypeOf<In>;
  task.to_type = call.to_type = kTypeOf<Out>;
  task.pitch = call.pitch = task.to_pitch = call.to_pitch = pitch;
  task.num_rows = call.num_rows = kRows;
  task.num_columns = call.num_columns = kColumns;
  task.bias = call.bias = has_bias ? Data(bias) : nullptr;
  task.to = Data(&expected);
  call.to = Data(&got);
  HostArithmetic(nullptr).Sum(task);
  Launch<int>(2, 8, [&](const Block& b, int*) { StoreSums<In, Out>(b, call); });
  CHECK(std::memcmp(expected.data(), got.data(), expected.size() * sizeof(Out)) == 0);
}

void EpiloguesAreThoseOfTheCpu() {
  constexpr int64_t kColumns = 1000;
  const auto sums = Random<float>(kColumns), bias = Random<float>(kColumns),
             input = Random<float>(kColumns);
  for (const bool is_gradient : {false, true}) {
    std::vector<float> expected(kColumns), got(kColumns), pre(kColumns), pre_expected(kColumns);
    Epilogue epilogue{Data(bias), true, is_gradient ? nullptr : Data(&pre_expected),
                      is_gradient ? Data(input) : nullptr};
    StoreRow(DataType::kF32, sums.data(), epilogue, kColumns, Data(&expected));
    SumCall call{};
    call.sources[0] = Data(sums);
    call.num_sources = 1;
    call.type = call.to_type = DataType::kF32;
    call.num_rows = 1;
    call.pitch = call.to_pitch = call.num_columns = kColumns;
    call.bias = Data(bias);
    call.gelu = true;
    call.pre_gelu = is_gradient ? nullptr : Data(&pre);
    call.gelu_input = is_gradient ? Data(input) : nullptr;
    call.to = Data(&got);
    Launch<int>(1, 32, [&](const Block& b, int*) { StoreSums<float, float>(b, call); });
    for (int64_t i = 0; i < kColumns; ++i) {
      CHECK(std::abs(got[i] - expected[i]) <= 1e-5f * (1 + std::abs(expected[i])));
    }
    CHECK(pre == pre_expected);
  }
}

void ColumnsAreSummed(bool is_across, int64_t num_rows, int64_t num_columns) {
  const auto data = Random<BF16>(num_rows * num_columns);
  const float scale = 0.5f;
  std::vector<float> got(num_columns, NAN);
  const ColumnsCall call{Data(data),
                         DataType::kBF16,
                         &scale,
                         is_across ? num_columns : 1,
                         is_across ? 1 : num_rows,
                         num_rows,
                         num_columns,
                         Data(&got),
                         DataType::kF32};
  Launch<ColumnsScratch>(
      2, 64, [&](const Block& b, ColumnsScratch* s) { SumColumns<BF16, float>(b, call, s); });
  for (int64_t j = 0; j < num_columns; ++j) {
    double sum = 0;
    for (int64_t i = 0; i < num_rows; ++i) {
      sum += static_cast<float>(data[is_across ? i * num_columns + j : j * num_rows + i]);
    }
    CHECK(std::abs(got[j] - sum * scale) < 1e-3);
  }
}

const Register kTests("test_sum_kernels", [](const Numbers&) {
  for (const bool has_bias : {false, true}) {
    for (const int64_t pitch : {37, 40}) {  // element by element, and by 16 bytes
      SumsAreThoseOfTheCpu<float, float>(has_bias, pitch);
      SumsAreThoseOfTheCpu<float, BF16>(has_bias, pitch);
      SumsAreThoseOfTheCpu<BF16, BF16>(has_bias, pitch);
      SumsAreThoseOfTheCpu<F16, float>(has_bias, pitch);
    }
  }
  EpiloguesAreThoseOfTheCpu();
  for (const bool is_across : {false, true}) {
    ColumnsAreSummed(is_across, 70, 45);
    ColumnsAreSummed(is_across, 72, 48);  // by 16 bytes
  }
});

}  // namespace cpd::kernels::test_sum_kernels
