// Copy planning of dispatch and combine: hostile metadata, overflows and plans of another batch are
// refused; sums with weights are those of plain loops.
#include <array>
#include <limits>
#include <memory>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "dispatch/dispatch.h"
#include "native_test.h"
#include "ranks.h"

namespace cpd::test_dispatch_plans {

// The contribution of one rank alone.
std::vector<std::unique_ptr<Contribution>> Alone(const OperandGroup& group) {
  auto mine = std::make_unique<DispatchContribution>();
  mine->groups = {group};
  std::vector<std::unique_ptr<Contribution>> contributions;
  contributions.push_back(std::move(mine));
  return contributions;
}

// Sums of an unsupported type are refused, even if Python let them through.
void UnknownTypesAreRefused() {
  float row = 0;
  int32_t dst_rank = 0;
  uint32_t zero = 0, one = 1, num_recv_tokens[] = {1, 1};
  OperandGroup group;
  group.tokens = group.buffers = {{reinterpret_cast<char*>(&row), 1, sizeof row}};
  group.types = {{DataType::kOther, DataType::kOther}};
  group.num_slots = group.num_replicas = 1;
  group.dst_rank = {&dst_rank, IntType::kI32};
  group.dst_offset = group.src_offset = {&zero, IntType::kU32};
  group.seq_len = {&one, IntType::kU32};
  group.num_recv_tokens = {num_recv_tokens, IntType::kU32};
  WorkList work;
  CHECK(Contains(PlanCombine("sum", Alone(group), &work), "cannot be summed"));
}

// No integer in the metadata overflows before it is refused.
void HostileNumbersAreRefused(int64_t seq_len, int64_t src_offset, int64_t dst_offset,
                              const char* message) {
  constexpr int64_t kSlots = 1 << 16;
  float row = 0;
  // All slots but the last are not sent: they only occupy rows.
  std::vector<int64_t> lengths(kSlots, seq_len), offsets(kSlots, dst_offset);
  std::vector<int64_t> ranks(kSlots, -1), first_rows(kSlots, src_offset);
  ranks.back() = 0;
  int64_t num_recv_tokens[] = {1, 1};
  OperandGroup group;
  group.tokens = group.buffers = {{reinterpret_cast<char*>(&row), 1, sizeof row}};
  group.types = {{DataType::kF32, DataType::kF32}};
  group.num_slots = kSlots;
  group.num_replicas = 1;
  group.dst_rank = {ranks.data(), IntType::kI64};
  group.dst_offset = {offsets.data(), IntType::kU64};
  group.seq_len = {lengths.data(), IntType::kI64};
  if (src_offset != 0) group.src_offset = {first_rows.data(), IntType::kI64};
  group.num_recv_tokens = {num_recv_tokens, IntType::kI64};
  WorkList work;
  CHECK(Contains(PlanDispatch("send", Alone(group), &work), message));
  CHECK(Contains(PlanCombine("combine", Alone(group), &work), message));
}

// One operand group per row of `need`: the tokens that each rank would receive, into buffers of
// four rows.
std::vector<std::unique_ptr<Contribution>> Announcing(
    std::vector<std::vector<std::array<int64_t, 4>>>* need) {
  static char rows[4];
  static const int64_t none = 0;
  static const int64_t nowhere = -1;
  std::vector<std::unique_ptr<Contribution>> contributions;
  for (size_t rank = 0; rank < 3; ++rank) {
    auto mine = std::make_unique<DispatchContribution>();
    mine->num_ranks = 3;
    for (auto& group_need : *need) {
      OperandGroup group;
      group.tokens = group.buffers = {{rows, 4, 1}};
      group.num_slots = group.num_replicas = 1;
      group.dst_rank = {&nowhere, IntType::kI64};
      group.dst_offset = group.seq_len = {&none, IntType::kI64};
      group.num_recv_tokens = {group_need[rank].data(), IntType::kI64};
      mine->groups.push_back(group);
    }
    contributions.push_back(std::move(mine));
  }
  return contributions;
}

// The message names the largest need, of every operand group, and the arguments that set the
// capacities.
void OverflowsNameTheLargestNeedOfEveryGroup() {
  std::vector<std::vector<std::array<int64_t, 4>>> need = {
      {{0, 0, 0, 5}, {0, 0, 0, 9}, {0, 0, 0, 7}}, {{0, 0, 0, 6}, {0, 0, 0, 2}, {0, 0, 0, 8}}};
  WorkList work;
  const Status status = PlanDispatch("send", Announcing(&need), &work, {"first,second"});
  CHECK(Contains(status, "send: rank 1 would receive 9 tokens but first is 4. Pass first>=9,"));
  CHECK(Contains(status, "rank 2 would receive 8 tokens but second is 4. Pass second>=8,"));
}

// Rejects a rank whose batch is not that of the plan, and a plan of another batch.
void FingerprintsAreCompared() {
  std::vector<std::vector<std::array<int64_t, 4>>> need(1, {{}, {}, {}});
  using Fingerprint = std::array<int32_t, kFingerprintSize>;
  const auto plan = [&](std::array<Fingerprint, 3> fingerprints) {
    auto contributions = Announcing(&need);
    for (int rank = 0; rank < 3; ++rank) {
      auto* mine = static_cast<DispatchContribution*>(contributions[rank].get());
      mine->groups[0].fingerprint = {fingerprints[rank].data(), IntType::kI32};
      // As other processes read it.
      contributions[rank] = ReadDispatchContribution(Direction::kDispatch, 3, mine->Write());
      CHECK(contributions[rank] != nullptr);
    }
    WorkList work;
    const std::vector<int> processes = {4, 4, 6};
    return PlanDispatch("send", contributions, &work, {"", &processes});
  };
  const auto of = [](int rank) { return Fingerprint{7, rank, rank, -1, -1, 0, 0}; };
  CHECK(plan({of(0), of(1), of(2)}).ok());
  CHECK(
      Contains(plan({of(0), of(1), {7, 2, 2, -1, 5, 0, 0}}),
               "send: the plan was made for another batch: the segment ids of rank 2 of process 6 "
               "have checksum 5 but the plan expects -1"));
  CHECK(Contains(plan({of(0), {7, 1, 1, 4, 4, 0, 2}, of(2)}),
                 "the positions of rank 1 of process 4 have checksum 2"));
  CHECK(Contains(plan({of(0), {7, 1, 1, 4, 4, 0, 0, 3, 2}, of(2)}),
                 "the mask of rank 1 of process 4 has checksum 2 but the plan expects 3"));
  CHECK(Contains(plan({of(0), {8, 1, 1, -1, -1, 0, 0}, of(2)}),
                 "rank 1 of process 4 follows the plan with checksum 8 but rank 0 of process 4 "
                 "follows another one, with checksum 7"));
  CHECK(Contains(plan({of(0), {7, 2, 1, -1, -1, 0, 0}, of(2)}),
                 "this is the part of rank 2, on rank 1 of process 4"));
  const auto fallback = [](int rank) { return Fingerprint{0, kNoRank, rank, 0, 0, 0, 0}; };
  CHECK(Contains(plan({fallback(0), fallback(1), fallback(2)}), "the plan is a fallback"));
}

// Without arrays nothing bounds the slots and nothing moves; the lengths are not summed either.
void HostileNumbersWithoutArrays() {
  const int64_t zeros[] = {0, 0}, lengths[] = {std::numeric_limits<int64_t>::max(), 1};
  OperandGroup group;
  group.num_slots = 2;
  group.num_replicas = 1;
  group.dst_rank = group.dst_offset = group.src_offset =
      group.num_recv_tokens = {zeros, IntType::kI64};
  group.seq_len = {lengths, IntType::kI64};
  for (const auto plan : {PlanDispatch, PlanCombine}) {
    WorkList work;
    CHECK(plan("send", Alone(group), &work, {}).ok());
    CHECK(work.num_tasks == 0);
  }
}

// Rows of the choices of tokens, times their weights, are summed and rounded on each rank, and then
// over the ranks in the order of the choices. Products have few bits: they are exact.
template <typename T, typename Weight>
void WeightedRowsAreSummedByRank(DataType type, int64_t columns) {
  constexpr int kRanks = 3;
  constexpr int64_t kTokens = 20, kChoices = 5, kCapacity = kRanks * kTokens * kChoices;
  using Wide = std::conditional_t<std::is_same_v<T, double>, double, float>;
  std::mt19937 rng(static_cast<unsigned>(columns));
  struct Rank {
    std::vector<T> rows, sums;
    std::vector<Weight> weights;
    std::vector<int32_t> dst_rank, dst_offset, seq_len, num_recv_tokens;
  };
  std::vector<Rank> ranks(kRanks);
  for (Rank& rank : ranks) {
    for (int64_t i = 0; i < kCapacity * columns; ++i) {
      rank.rows.push_back(Round<T>(static_cast<float>(static_cast<int>(rng() % 255) - 127) / 8));
    }
    rank.sums.assign(kTokens * columns, Round<T>(7));
    rank.seq_len.assign(kTokens, 1);
    rank.num_recv_tokens.assign(kRanks + 1, 0);
  }
  for (int r = 0; r < kRanks; ++r) {
    Rank& rank = ranks[r];
    for (int64_t i = 0; i < kTokens * kChoices; ++i) {
      const int to = i < kChoices ? -1 : static_cast<int>(rng() % (kRanks + 1)) - 1;
      rank.dst_rank.push_back(to);
      rank.dst_offset.push_back(0);
      rank.weights.push_back(static_cast<Weight>(static_cast<int>(rng() % 31) - 15) / 4);
      if (to < 0) continue;
      rank.dst_offset.back() = ranks[to].num_recv_tokens[kRanks]++;
      ++ranks[to].num_recv_tokens[r];
    }
  }
  std::vector<std::unique_ptr<Contribution>> contributions;
  for (Rank& rank : ranks) {
    OperandGroup group;
    const int64_t bytes = columns * static_cast<int64_t>(sizeof(T));
    group.tokens = {{reinterpret_cast<char*>(rank.sums.data()), kTokens, bytes}};
    group.buffers = {{reinterpret_cast<char*>(rank.rows.data()), kCapacity, bytes}};
    group.types = {{type, type}};
    group.num_slots = kTokens;
    group.num_replicas = kChoices;
    group.dst_rank = {rank.dst_rank.data(), IntType::kI32};
    group.dst_offset = {rank.dst_offset.data(), IntType::kI32};
    group.seq_len = {rank.seq_len.data(), IntType::kI32};
    group.num_recv_tokens = {rank.num_recv_tokens.data(), IntType::kI32};
    group.weights = rank.weights.data();
    group.weight_type = sizeof(Weight) == 8 ? DataType::kF64 : DataType::kF32;
    auto mine = std::make_unique<DispatchContribution>();
    mine->direction = Direction::kCombine;
    mine->num_ranks = kRanks;
    mine->groups = {group};
    contributions.push_back(std::move(mine));
  }
  WorkList work;
  CHECK(PlanCombine("combine", contributions, &work).ok());
  for (int64_t task = 0; task < work.num_tasks; ++task) work.run(task);
  for (const Rank& rank : ranks) {
    for (int64_t at = 0; at < kTokens * columns; ++at) {
      const int64_t first = at / columns * kChoices;
      Wide total = 0;
      for (int64_t i = first; i < first + kChoices; ++i) {
        const int to = rank.dst_rank[i];
        bool is_new = to >= 0;
        for (int64_t j = first; j < i; ++j) is_new = is_new && rank.dst_rank[j] != to;
        Wide part = 0;
        for (int64_t j = i; is_new && j < first + kChoices; ++j) {
          if (rank.dst_rank[j] != to) continue;
          const T row = ranks[to].rows[rank.dst_offset[j] * columns + at % columns];
          part += static_cast<Wide>(row) * static_cast<Wide>(rank.weights[j]);
        }
        total += static_cast<Wide>(Round<T>(part));
      }
      CHECK(static_cast<Wide>(rank.sums[at]) == static_cast<Wide>(Round<T>(total)));
    }
  }
}

const Register kTests("test_dispatch_plans", [](const Numbers&) {
  UnknownTypesAreRefused();
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  HostileNumbersAreRefused(kMost, 0, 0, "but the rank has 1 tokens");
  HostileNumbersAreRefused(5, kMost, 0, "but the rank has 1 tokens");
  HostileNumbersAreRefused(-kMost, 0, 0, "both must be at least 0");
  HostileNumbersAreRefused(1, -kMost, 0, "both must be at least 0");
  HostileNumbersAreRefused(0, -1, 0, "both must be at least 0");
  HostileNumbersAreRefused(-1, 1, 0, "both must be at least 0");
  HostileNumbersWithoutArrays();
  OverflowsNameTheLargestNeedOfEveryGroup();
  FingerprintsAreCompared();
  for (const int64_t columns : {1, 21, 1100}) {  // more than are summed at a time
    WeightedRowsAreSummedByRank<BF16, float>(DataType::kBF16, columns);
    WeightedRowsAreSummedByRank<BF16, double>(DataType::kBF16, columns);
    WeightedRowsAreSummedByRank<float, float>(DataType::kF32, columns);
    WeightedRowsAreSummedByRank<double, double>(DataType::kF64, columns);
  }
});

}  // namespace cpd::test_dispatch_plans
