// The calls of two ranks with two blocks of two threads each, for the model of memory: three calls
// of dispatch and of combine on one channel, in several kernels, in one, and alternately; and all
// ranks in one launch.
#include <cstring>

#include "../call_order.h"
#include "model.h"

namespace cpd::kernels {
namespace {

using model::Barrier;
using model::Require;

constexpr int kRanks = 2, kBlocks = 2, kBlockThreads = 2, kCalls = 3;
static_assert(model::kThreads == kRanks * kBlocks * kBlockThreads);
constexpr int kTokens = 3, kCapacity = 4, kWords = 4;  // of a row: two vectors of 16 bytes
constexpr int kChannelBytes = 4096, kLocalBytes = 2048;

// Rank 0 sends a row to itself and two to rank 1, by two blocks; rank 1 sends only to itself: rank
// 0 gets nothing of it.
const int32_t num_recv_tokens[kRanks][kRanks + 1] = {{1, 0, 1}, {2, 1, 3}};
const int32_t seq_len[kRanks][2] = {{1, 2}, {0, 1}};
const int32_t dst_rank[kRanks][2] = {{0, 1}, {0, 1}};
const int32_t dst_offset[kRanks][2] = {{0, 0}, {0, 2}};

alignas(256) char channels[kRanks][kChannelBytes];
alignas(256) char local[kRanks * kLocalBytes];
alignas(16) uint64_t tokens[kRanks][kTokens][kWords], buffers[kRanks][kCapacity][kWords];
ErrorRecord errors[kRanks];

union alignas(16) Scratch {
  PlanScratch plan;
  MoveScratch move;
  MeetScratch meet;
  UnpackScratch unpack;
  SumScratch sum;
  SmallScratch small;
  bool is_last;
} memory[kRanks][kBlocks];

Barrier of_block[] = {Barrier(2), Barrier(2), Barrier(2), Barrier(2)};
Barrier of_rank[] = {Barrier(4), Barrier(4)};
Barrier of_all(8);

const struct Tracked {
  Tracked() {
    model::Track(channels, sizeof channels);
    model::Track(local, sizeof local);
    model::Track(tokens, sizeof tokens);
    model::Track(buffers, sizeof buffers);
    model::Track(errors, sizeof errors);
    model::Track(memory, sizeof memory);
  }
} tracked;

// What is run: in one iteration all of these, with an empty channel each.
struct Scenario {
  bool is_dispatch, is_one_launch;
  unsigned small;  // by bit: (call, rank)
};

Call CallOf(const Scenario& scenario, int rank) {
  Call call{};
  call.num_ranks = kRanks;
  call.num_local = scenario.is_one_launch ? kRanks : 1;
  call.first_rank = scenario.is_one_launch ? 0 : rank;
  call.num_groups = call.num_arrays = 1;
  call.is_dispatch = scenario.is_dispatch;
  call.deadline_ns = uint64_t{1} << 60;
  OperandGroup& group = call.groups[0];
  group.num_recv_tokens = {num_recv_tokens, IntType::kI32};
  group.seq_len = {seq_len, IntType::kI32};
  group.dst_rank = {dst_rank, IntType::kI32};
  group.dst_offset = {dst_offset, IntType::kI32};
  group.has_all_views = true;
  group.num_slots = kRanks;
  group.num_replicas = 1;
  group.num_tokens = kTokens;
  group.capacity = kCapacity;
  group.rows_per_strip = group.rows_per_push = 1;
  group.num_arrays = 1;
  Array& array = call.arrays[0];
  auto* rows = reinterpret_cast<char*>(tokens[call.first_rank]);
  auto* held = reinterpret_cast<char*>(buffers[call.first_rank]);
  array.in = scenario.is_dispatch ? rows : held;
  array.out = scenario.is_dispatch ? held : rows;
  array.in_row_bytes = array.out_row_bytes = 8 * kWords;
  array.in_type = array.out_type = DataType::kU64;
  LayOutChannel(&call);
  LayOutLocal(&call);
  for (int r = 0; r < kRanks; ++r) call.symmetric[r] = channels[r];
  call.local = local + call.first_rank * kLocalBytes;
  call.errors = &errors[call.first_rank];
  return call;
}

uint64_t ValueOf(int call, int rank, int row, int word) {
  return 1 + word + 10 * (row + 10 * (rank + 10 * uint64_t(call)));
}

// One thread's part of a scenario.
class Thread {
 public:
  Thread(const Scenario& scenario, int thread)
      : scenario_(scenario),
        rank_(thread / (kBlocks * kBlockThreads)),
        block_(thread / kBlockThreads % kBlocks),
        thread_(thread % kBlockThreads),
        call_(CallOf(scenario, rank_)) {}

  void Run() {
    for (int n = 0; n < kCalls; ++n) {
      if (IsFirst()) Fill(n);
      EndOfKernel();
      const unsigned bit = scenario_.is_one_launch ? kRanks * n : kRanks * n + rank_;
      const bool is_small = scenario_.small >> bit & 1;
      is_small ? RunInOne() : RunInSeveral();
      if (IsFirst()) Check(n);
      EndOfKernel();
    }
  }

 private:
  bool IsFirst() const { return block_ == 0 && thread_ == 0; }
  Rank ThisRank() const { return {call_, scenario_.is_one_launch ? rank_ : 0}; }

  Block ThisBlock(int num_blocks) const {
    return {thread_, kBlockThreads, num_blocks == 1 ? 0 : block_, num_blocks,
            &of_block[rank_ * kBlocks + block_]};
  }

  // A stream runs one kernel after another.
  void EndOfKernel() { (scenario_.is_one_launch ? of_all : of_rank[rank_]).Wait(); }

  // One block of each rank, or all of them.
  template <typename Kernel>
  void Launch(int num_blocks, Kernel kernel) {
    if (block_ < num_blocks) kernel(ThisBlock(num_blocks), ThisRank(), &memory[rank_][block_]);
    EndOfKernel();
  }

  void RunInSeveral() {
    const auto launch = [&](int num_blocks, auto* scratch, const auto& kernel) {
      Launch(num_blocks, [&](const Block& b, const Rank& rank, Scratch* s) {
        kernel(b, rank, reinterpret_cast<decltype(scratch)>(s));
      });
    };
    LaunchInOrder<Mapped>(call_, kBlocks, launch, [] {});
  }

  void RunInOne() {
    const int num_blocks = scenario_.is_one_launch ? kBlocks : 1;
    Launch(num_blocks, [&](const Block& b, const Rank&, Scratch* s) {
      (call_.is_dispatch ? RunSmall<true> : RunSmall<false>)(b, call_, &s->small);
    });
  }

  void Fill(int n) {
    for (int row = 0; row < kCapacity; ++row) {
      for (int w = 0; w < kWords; ++w) {
        const uint64_t value = ValueOf(n, rank_, row, w), none = ~uint64_t{0};
        if (row < kTokens) tokens[rank_][row][w] = call_.is_dispatch ? value : none;
        buffers[rank_][row][w] = call_.is_dispatch ? none : value;
      }
    }
  }

  // What each row of the results comes from: rank and row, or nothing.
  struct From {
    int rank, row;
  };
  void Check(int n) {
    constexpr From kDispatched[kRanks][kCapacity] = {{{0, 0}, {-1, 0}, {-1, 0}, {-1, 0}},
                                                     {{0, 1}, {0, 2}, {1, 0}, {-1, 0}}};
    constexpr From kCombined[kRanks][kTokens] = {{{0, 0}, {1, 0}, {1, 1}},
                                                 {{1, 2}, {-1, 0}, {-1, 0}}};
    for (int row = 0; row < (call_.is_dispatch ? kCapacity : kTokens); ++row) {
      const From from = call_.is_dispatch ? kDispatched[rank_][row] : kCombined[rank_][row];
      for (int w = 0; w < kWords; ++w) {
        const uint64_t got = call_.is_dispatch ? buffers[rank_][row][w] : tokens[rank_][row][w];
        const uint64_t wanted = from.rank < 0 ? 0 : ValueOf(n, from.rank, from.row, w);
        Require(got == wanted, "a row of a result is wrong");
      }
    }
    Require(errors[rank_].raised == 0, "a call failed");
  }

  const Scenario scenario_;
  const int rank_, block_, thread_;
  const Call call_;
};

constexpr Scenario kScenarios[] = {
    {true, false, 0},         {false, false, 0},       {true, false, 0b111111},
    {false, false, 0b111111}, {true, false, 0b100110}, {true, true, 0b001100},
    {true, true, 0b111111},   {false, true, 0b110011},
};

}  // namespace
}  // namespace cpd::kernels

namespace cpd::model {

int scenario = 0;  // of this run

void Begin() {
  using namespace cpd::kernels;  // NOLINT
  std::memset(channels, 0, sizeof channels);
  std::memset(local, 0, sizeof local);
  std::memset(memory, 0, sizeof memory);
  std::memset(static_cast<void*>(errors), 0, sizeof errors);
  for (Barrier& barrier : of_block) barrier.Reset();
  for (Barrier& barrier : of_rank) barrier.Reset();
  of_all.Reset();
  scenario = (scenario + 1) % (sizeof kScenarios / sizeof kScenarios[0]);
}

void RunThread(int thread) {
  cpd::kernels::Thread(cpd::kernels::kScenarios[scenario], thread).Run();
}

}  // namespace cpd::model
