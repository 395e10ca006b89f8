// The kernels around a product on threads of the host: sums and epilogues, bias gradients and the
// order of scales against the CPU's results; transposes; and ranks that meet, come late or run
// another program.
#include <cmath>
#include <random>

#include "cuda/errors.h"
#include "device.h"
#include "gemm/arithmetic.h"
#include "gemm/swizzle.h"
#include "kernels/meeting.h"
#include "kernels/product.h"
#include "native_test.h"
#include "ranks.h"

namespace cpd::kernels::test_product_kernels {

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

// With gaps at the edges of tiles; 16 bytes at a time where lines and addresses allow it.
void BytesAreTransposed(int64_t num_rows, int64_t num_columns, int64_t offset) {
  std::vector<char> memory(num_rows * num_columns + 32), result(memory.size());
  for (char& byte : memory) byte = static_cast<char>(rng());
  const auto aligned = [&](std::vector<char>& x) {
    return x.data() + (16 - reinterpret_cast<uintptr_t>(x.data()) % 16) % 16 + offset;
  };
  const char* from = aligned(memory);
  char* to = aligned(result);
  const TransposeCall call{from, to, num_rows, num_columns};
  Launch<TransposeScratch>(3, 64,
                           [&](const Block& b, TransposeScratch* s) { Transpose(b, call, s); });
  for (int64_t i = 0; i < num_rows; ++i) {
    for (int64_t j = 0; j < num_columns; ++j) {
      CHECK(to[j * num_rows + i] == from[i * num_columns + j]);
    }
  }
}

void ScalesLieAsOnTheCpu(bool across) {
  constexpr int64_t kLines = 200, kBlocks = 6, kPitchOfLines = 256, kPitchOfBlocks = 8;
  std::vector<char> scales(kPitchOfLines * kPitchOfBlocks);
  for (char& byte : scales) byte = static_cast<char>(rng());
  const int64_t pitch = across ? kPitchOfLines : kPitchOfBlocks;
  std::vector<char> expected(2 * 2 * 512), got(expected.size(), 1);
  SwizzleScales({scales.data(), pitch, across}, kLines, kBlocks, expected.data());
  const SwizzleCall call{scales.data(), got.data(), pitch, across, kLines, kBlocks};
  Launch<int>(3, 64, [&](const Block& b, int*) { Swizzle(b, call); });
  CHECK(got == expected);
}

// ---- Ranks that meet.

struct Ranks {
  explicit Ranks(int num_ranks, uint64_t deadline_ms = 60000)
      : memory(num_ranks), states(num_ranks), errors(num_ranks), meetings(num_ranks) {
    for (int r = 0; r < num_ranks; ++r) {
      memory[r].resize(MeetingBytes(num_ranks, 2) / 8);
      Meeting& m = meetings[r];
      m = {};
      m.state = &states[r];
      m.error = &errors[r];
      m.deadline_ns = deadline_ms * 1'000'000;
      m.program = 7;
      m.num_ranks = num_ranks;
      m.rank = r;
    }
    for (Meeting& m : meetings) {
      for (int r = 0; r < num_ranks; ++r) m.symmetric[r] = reinterpret_cast<char*>(&memory[r][0]);
    }
  }

  void Begin(int r) {
    Launch<BeginScratch>(
        1, 4, [&](const Block& b, BeginScratch* s) { kernels::Begin(b, meetings[r], s); });
  }
  std::string Error(int r) const {
    return errors[r].raised == 0 ? "" : Describe("op", errors[r], meetings[r].num_ranks, 1);
  }

  std::vector<std::vector<uint64_t>> memory;
  std::vector<State> states;
  std::vector<ErrorRecord> errors;
  std::vector<Meeting> meetings;
};

template <typename Work>
void OnThreads(int num_ranks, Work work) {
  std::vector<std::thread> threads;
  for (int r = 0; r < num_ranks; ++r) threads.emplace_back(work, r);
  for (std::thread& thread : threads) thread.join();
}

// In every call, data that a rank puts before its signal is visible to the rank that has waited.
void RanksMeet() {
  constexpr int kRanks = 3;
  Ranks ranks(kRanks);
  std::vector<int> buffer(kRanks, 0);  // written by the rank before
  OnThreads(kRanks, [&](int r) {
    const int next = (r + 1) % kRanks, previous = (r + kRanks - 1) % kRanks;
    for (int call = 1; call <= 50; ++call) {
      ranks.Begin(r);
      buffer[next] = call;
      Tell(ranks.meetings[r], next, 1);
      WaitFor(ranks.meetings[r], previous, 1);
      CHECK(buffer[r] == call);
    }
  });
  for (int r = 0; r < kRanks; ++r) CHECK(ranks.Error(r).empty() && ranks.states[r].epoch == 50);
}

void ALateRankIsNamed() {
  Ranks ranks(2, /*deadline_ms=*/30);
  ranks.Begin(0);
  CHECK(Contains(Status::Invalid(ranks.Error(0)),
                 "op: rank 0 waited for rank 1 until the deadline: signal expected 1, seen 0"));
  // It arrives late: the other has given up, and results are NaN on both.
  ranks.Begin(1);
  WaitFor(ranks.meetings[1], 0, 0);
  CHECK(Contains(Status::Invalid(ranks.Error(1)), "rank 1 waited for rank 0"));
  for (int r = 0; r < 2; ++r) {
    float result[3] = {1, 2, 3};
    Launch<int>(1, 2, [&](const Block& b, int*) {
      Spoil(b, &ranks.states[r], reinterpret_cast<char*>(result), sizeof result);
    });
    for (const float value : result) CHECK(std::isnan(value));
  }
  ranks.errors[0] = {};
  ranks.Begin(0);  // every later call fails at once
  CHECK(Contains(Status::Invalid(ranks.Error(0)), "cannot use this buffer any more"));
  ranks.errors[1] = {};
  ranks.states[1].broken = ranks.states[1].failed = 0;
  ranks.states[1].epoch = 1;
  ranks.Begin(1);  // ranks that did not fail are notified
  CHECK(Contains(Status::Invalid(ranks.Error(1)), "rank 0 gave up on this buffer"));
}

void AMissingSignalIsNamed() {
  Ranks ranks(2);
  OnThreads(2, [&](int r) { ranks.Begin(r); });
  for (Meeting& m : ranks.meetings) m.deadline_ns = 30'000'000;
  WaitFor(ranks.meetings[0], 1, 0);
  CHECK(Contains(Status::Invalid(ranks.Error(0)), "rank 0 waited for rank 1 until the deadline"));
  CHECK(ranks.states[0].failed == kGivenUp && ranks.states[1].failed == kFine);
  Tell(ranks.meetings[0], 1, 0);  // signals that it has given up
  WaitFor(ranks.meetings[1], 0, 0);
  CHECK(Contains(Status::Invalid(ranks.Error(1)), "rank 0 gave up on this buffer"));
}

void AnotherProgramIsNamed() {
  Ranks ranks(2);
  ranks.meetings[1].program = 8;
  OnThreads(2, [&](int r) { ranks.Begin(r); });
  CHECK(Contains(Status::Invalid(ranks.Error(0)), "rank 0 runs another call than rank 1"));
  CHECK(Contains(Status::Invalid(ranks.Error(1)), "rank 1 runs another call than rank 0"));
}

const Register kTests("test_product_kernels", [](const Numbers&) {
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
    ScalesLieAsOnTheCpu(is_across);
  }
  BytesAreTransposed(70, 33, 0);
  BytesAreTransposed(80, 144, 0);
  BytesAreTransposed(80, 144, 1);
  BytesAreTransposed(16, 208, 0);
  RanksMeet();
  ALateRankIsNamed();
  AMissingSignalIsNamed();
  AnotherProgramIsNamed();
});

}  // namespace cpd::kernels::test_product_kernels
