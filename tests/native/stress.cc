// Random programs against a scalar oracle: every byte is checked, failures must reach every rank,
// and nothing may hang. `stress [programs] [seed]` prints counts.
#include <algorithm>
#include <atomic>

#include "dispatch/dispatch.h"
#include "native_test.h"
#include "ranks.h"
#include "stress_call.h"

namespace cpd::stress {

using std::chrono::milliseconds;

constexpr int32_t kPoison = 0x5a5a5a5a;

enum class Fault { kNone, kBadPlan, kMissing, kRefused };

struct Program {
  int64_t run_id;
  int num_ranks, num_groups, num_rounds;
  bool waits_for_each;  // else all calls of a round are open at a time
  milliseconds deadline;
  std::vector<std::vector<Call>> calls;  // [group][call]
  Fault fault;
  int fault_rank, fault_group, fault_call, fault_round;
};

struct Counts {
  std::atomic<int64_t> num_ok{0}, num_failed{0}, num_bytes{0};
};

class Rank {
 public:
  Rank(Program& program, int group, int rank, uint32_t seed, Counts& counts)
      : program_(program),
        group_(group),
        rank_(rank),
        rng_(seed),
        helpers_(seed),
        counts_(counts) {}

  void Run() {
    const size_t num_calls = program_.calls[group_].size();
    for (int round = 0; round < program_.num_rounds; ++round) {
      for (size_t c = 0; c < num_calls; ++c) {
        if (Draw(rng_, 0, 1)) {
          std::this_thread::sleep_for(std::chrono::microseconds(Draw(rng_, 0, 400)));
        }
        const bool is_faulty = program_.fault_rank == rank_ && program_.fault_group == group_ &&
                               program_.fault_call == static_cast<int>(c) &&
                               program_.fault_round == round;
        if (is_faulty && program_.fault == Fault::kMissing) {
          Finish();
          return;
        }
        Start(round, c, is_faulty);
        if (program_.waits_for_each && !Finish()) return;
      }
      if (!Finish()) return;
    }
  }

 private:
  struct Open {
    int round;
    size_t call;
    std::future<Status> status;
  };

  void Start(int round, size_t c, bool is_faulty) {
    Call& call = program_.calls[group_][c];
    Exchange exchange{call.is_dispatch ? "dispatch" : "combine",
                      {program_.run_id, static_cast<int64_t>(c), group_},
                      program_.num_ranks,
                      program_.deadline,
                      {}};
    exchange.planner = [&call](const auto& ranks, WorkList* work) {
      return call.is_dispatch ? PlanDispatch("stress", ranks, work)
                              : PlanCombine("stress", ranks, work);
    };
    auto mine = std::make_unique<DispatchContribution>();
    for (RandomGroup& group : call.groups) mine->groups.push_back(Contributed(call, group));
    if (is_faulty && program_.fault == Fault::kRefused) {
      open_.push_back({round, c, Refuse(exchange, Status::Invalid("no such buffer"))});
      return;
    }
    if (is_faulty && program_.fault == Fault::kBadPlan) {
      mine->groups[0].num_recv_tokens = {too_many_.data(), IntType::kI64};
    }
    open_.push_back({round, c, Join(exchange, rank_, std::move(mine), std::ref(helpers_))});
  }

  OperandGroup Contributed(const Call& call, RandomGroup& group) {
    RankOperands& mine = group.ranks[rank_];
    OperandGroup operands;
    for (size_t a = 0; a < group.row_elements.size(); ++a) {
      auto& out = call.is_dispatch ? mine.buffers[a] : mine.tokens[a];
      std::fill(out.begin(), out.end(), kPoison);
      const int64_t row_bytes = group.row_elements[a] * 4;
      operands.tokens.push_back(
          {reinterpret_cast<char*>(mine.tokens[a].data()), group.num_tokens, row_bytes});
      operands.buffers.push_back(
          {reinterpret_cast<char*>(mine.buffers[a].data()), group.capacity, row_bytes});
      operands.types.push_back({DataType::kI32, DataType::kI32});
    }
    operands.num_slots = group.num_slots;
    operands.num_replicas = group.num_replicas;
    operands.dst_rank = mine.dst_rank_view;
    operands.dst_offset = mine.dst_offset_view;
    operands.seq_len = mine.seq_len_view;
    operands.src_offset = mine.src_offset_view;
    operands.num_recv_tokens = mine.num_recv_view;
    return operands;
  }

  // Waits for all open calls. Returns false if something failed; the program then ends here.
  bool Finish() {
    bool all_ok = true;
    for (Open& open : open_) {
      const Status status = open.status.get();
      (status.ok() ? counts_.num_ok : counts_.num_failed) += 1;
      all_ok = all_ok && status.ok();
      if (status.ok()) {
        CHECK(!MustFail(open));
        Compare(program_.calls[group_][open.call]);
        continue;
      }
      CheckUntouched(program_.calls[group_][open.call]);
      switch (program_.fault) {
        case Fault::kNone: CHECK(Contains(status, "(none should fail)")); break;
        case Fault::kBadPlan:
          CHECK(Contains(status, "would receive 1048576 tokens but capacity is"));
          break;
        case Fault::kMissing: CHECK(Contains(status, "ms passed")); break;
        case Fault::kRefused: CHECK(Contains(status, "no such buffer"));
      }
    }
    open_.clear();
    return all_ok;
  }

  bool MustFail(const Open& open) const {
    return program_.fault != Fault::kNone && group_ == program_.fault_group &&
           open.round == program_.fault_round && static_cast<int>(open.call) == program_.fault_call;
  }

  void Compare(const Call& call) {
    for (const RandomGroup& group : call.groups) {
      const RankOperands& mine = group.ranks[rank_];
      const auto& out = call.is_dispatch ? mine.buffers : mine.tokens;
      CHECK(out == mine.expected);
      for (const auto& array : out) counts_.num_bytes += static_cast<int64_t>(array.size()) * 4;
    }
  }

  // A failed call has moved nothing.
  void CheckUntouched(const Call& call) {
    for (const RandomGroup& group : call.groups) {
      const RankOperands& mine = group.ranks[rank_];
      for (const auto& array : call.is_dispatch ? mine.buffers : mine.tokens) {
        for (const int32_t element : array) CHECK(element == kPoison);
      }
    }
  }

  Program& program_;
  const int group_, rank_;
  Rng rng_;
  std::vector<int64_t> too_many_ = std::vector<int64_t>(17, 1 << 20);
  std::vector<Open> open_;
  Helpers helpers_;
  Counts& counts_;
};

Program DrawProgram(Rng& rng, int64_t run_id) {
  Program program;
  program.run_id = run_id;
  program.num_ranks = static_cast<int>(Draw(rng, 1, 16));
  program.num_groups = static_cast<int>(Draw(rng, 1, program.num_ranks > 8 ? 1 : 3));
  program.num_rounds = static_cast<int>(Draw(rng, 1, 4));
  program.waits_for_each = Draw(rng, 0, 1);
  const int num_calls = static_cast<int>(Draw(rng, 1, 5));
  program.calls.resize(program.num_groups);
  for (auto& calls : program.calls) {
    for (int c = 0; c < num_calls; ++c) calls.push_back(DrawCall(rng, program.num_ranks));
  }
  program.fault = Draw(rng, 0, 3) == 0 ? static_cast<Fault>(Draw(rng, 1, 3)) : Fault::kNone;
  // A rank alone cannot be missed.
  if (program.fault == Fault::kMissing && program.num_ranks == 1) program.fault = Fault::kNone;
  program.deadline = milliseconds(program.fault == Fault::kMissing ? Draw(rng, 1, 60) : 60000);
  program.fault_rank = static_cast<int>(Draw(rng, 0, program.num_ranks - 1));
  program.fault_group = static_cast<int>(Draw(rng, 0, program.num_groups - 1));
  program.fault_call = static_cast<int>(Draw(rng, 0, num_calls - 1));
  program.fault_round = static_cast<int>(Draw(rng, 0, program.num_rounds - 1));
  return program;
}

void Run(Program& program, uint32_t seed, Counts& counts) {
  std::vector<std::future<void>> ranks;
  for (int group = 0; group < program.num_groups; ++group) {
    for (int rank = 0; rank < program.num_ranks; ++rank) {
      ranks.push_back(std::async(std::launch::async, [&, group, rank] {
        Rank(program, group, rank, seed + group * 16 + rank, counts).Run();
      }));
    }
  }
  for (auto& rank : ranks) {
    if (rank.wait_for(std::chrono::seconds(1000)) == std::future_status::ready) continue;
    std::fprintf(stderr, "program %lld hangs\n", static_cast<long long>(program.run_id));
    std::_Exit(1);
  }
}

const Register kTests("stress", [](const Numbers& numbers) {
  const int num_programs = numbers.Get(0, 2000);
  const int seed = numbers.Get(1, 0);
  Counts counts;
  int num_with_fault[4] = {};
  for (int i = 0; i < num_programs; ++i) {
    Rng rng(static_cast<uint32_t>(seed + i));
    Program program = DrawProgram(rng, i + 1);
    ++num_with_fault[static_cast<int>(program.fault)];
    Run(program, rng(), counts);
  }
  std::printf(
      "%d programs: %d without a fault, %d with a bad plan, %d with a missing rank, %d refused; "
      "%lld calls of a rank done, %lld failed; %lld bytes right\n",
      num_programs, num_with_fault[0], num_with_fault[1], num_with_fault[2], num_with_fault[3],
      static_cast<long long>(counts.num_ok), static_cast<long long>(counts.num_failed),
      static_cast<long long>(counts.num_bytes));
});

}  // namespace cpd::stress
