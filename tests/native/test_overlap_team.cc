// Schedules of overlapped GEMMs on the streams of GPUs, without a GPU: streams are lists whose
// items run in any order that events and signals allow. All ranks share one device, or each has its
// own and sees only the buffers of the others.
#include <array>
#include <map>
#include <random>
#include <set>

#include "gpu_schedule/overlap_team.h"
#include "native_test.h"
#include "overlap_call.h"
#include "overlap_problems.h"

namespace cpd::test_overlap_team {

// Messages between devices: the sender, and the signal.
using Signals = std::set<std::array<int, 2>>;  // receiver, signal

// One device. An operation that is not ready returns false and runs later.
class FakeDevice final : public GpuQueues {
 public:
  explicit FakeDevice(Signals* signals) : signals_(signals) {}

  void Choose(int rank, Lane lane) override { chosen_ = &streams_[{rank, static_cast<int>(lane)}]; }
  void Copy(const std::vector<RowCopy>& copies) override {
    Then([copies] { CopyRows(copies); });
  }
  int RecordEvent() override {
    const int event = num_events_++;
    Then([this, event] { reached_.insert(event); });
    return event;
  }
  void WaitForEvent(int event) override {
    CHECK(event < num_events_);
    chosen_->push_back([this, event] { return reached_.count(event) > 0; });
  }
  void SignalPeer(int, int peer, int signal) override {
    Then([this, peer, signal] { CHECK(signals_->insert({peer, signal}).second); });
  }
  void WaitForPeer(int rank, int, int signal) override {
    chosen_->push_back([this, rank, signal] { return signals_->count({rank, signal}) > 0; });
  }
  void BeginSpan(int, SpanKind, const std::string&) override { ++num_open_; }
  void EndSpan() override { --num_open_; }

  void Then(std::function<void()> work) {
    chosen_->push_back([work = std::move(work)] {
      work();
      return true;
    });
  }

  // Runs one operation of one stream, if any can.
  bool RunOne(std::mt19937* rng) {
    CHECK(num_open_ == 0);
    std::vector<std::vector<Operation>*> ready;
    for (auto& [name, stream] : streams_) {
      if (!stream.empty()) ready.push_back(&stream);
    }
    std::shuffle(ready.begin(), ready.end(), *rng);
    for (std::vector<Operation>* stream : ready) {
      if (!stream->front()()) continue;
      stream->erase(stream->begin());
      return true;
    }
    return false;
  }

  bool IsDone() const {
    return std::all_of(streams_.begin(), streams_.end(), [](auto& x) { return x.second.empty(); });
  }

 private:
  using Operation = std::function<bool()>;

  Signals* const signals_;
  std::map<std::array<int, 2>, std::vector<Operation>> streams_;
  std::vector<Operation>* chosen_ = nullptr;
  std::set<int> reached_;
  int num_events_ = 0, num_open_ = 0;
};

// Computes when the device reaches the operation.
class QueuedArithmetic final : public Arithmetic {
 public:
  explicit QueuedArithmetic(FakeDevice* device) : device_(device) {}
  void Multiply(const GemmTask& task) const override {
    CHECK(task.more.empty());
    Then([task](auto& host) { host.Multiply(task); });
  }
  void Sum(const SumTask& task) const override {
    Then([task](auto& host) { host.Sum(task); });
  }
  void Copy(const std::vector<RowCopy>& copies) const override {
    Then([copies](auto& host) { host.Copy(copies); });
  }
  void Clear(char* rows, int64_t pitch, int64_t num_rows, int64_t row_bytes) const override {
    Then([=](auto& host) { host.Clear(rows, pitch, num_rows, row_bytes); });
  }
  void Finish(const OverlapProblem&, const RankMemory&, const char*) const override {}

 private:
  void Then(std::function<void(const HostArithmetic&)> work) const {
    device_->Then([work = std::move(work)] { work(HostArithmetic(PlainGemm)); });
  }
  FakeDevice* const device_;
};

void Run(const Call& call, bool on_one_device, std::mt19937* rng) {
  const int num_ranks = call.problem().num_ranks();
  const int num_local = on_one_device ? num_ranks : 1;
  Signals signals;
  std::vector<std::unique_ptr<FakeDevice>> devices;
  std::vector<std::unique_ptr<CommOverlap>> schedules;  // kept until all has run
  for (int first = 0; first < num_ranks; first += num_local) {
    devices.push_back(std::make_unique<FakeDevice>(&signals));
    OverlapProblem problem = call.problem();
    for (int rank = 0; rank < num_ranks; ++rank) {
      if (rank >= first && rank < first + num_local) continue;
      char* buffer = problem.ranks[rank].buffer;
      problem.ranks[rank] = {};
      problem.ranks[rank].buffer = buffer;
    }
    schedules.push_back(
        MakeCommOverlap(problem, std::make_shared<QueuedArithmetic>(devices.back().get())));
    const CommOverlap& core = *schedules.back();
    OverlapTeam team(core.Record(), core.num_signals(), first, num_local);
    CHECK(team.Enqueue("test", devices.back().get()).ok());
  }
  for (bool moves = true; moves;) {
    moves = false;
    for (auto& device : devices) moves = device->RunOne(rng) || moves;
  }
  for (auto& device : devices) CHECK(device->IsDone());
}

void ResultsAreThoseOfAPlainComputation(int num_ranks, bool on_one_device) {
  std::mt19937 rng(num_ranks);
  std::vector<int64_t> counts;
  for (int rank = 0; rank < num_ranks; ++rank) counts.push_back((3 * rank + 2) % 5);
  bool is_odd = false;
  for (OverlapProblem& problem : AllProblems(counts)) {
    is_odd = !is_odd;
    problem.config = OnGpus(problem.config);
    problem.shares_only_buffers = true;
    problem.rows.num_batches = is_odd ? 2 : 1;
    problem.rows.capacity += is_odd;
    problem.rhs_transposed = is_odd;
    const Call call(problem, /*has_bias=*/is_odd);
    Run(call, on_one_device, &rng);
    CHECK(call.IsRight());
  }
}

// The kernels to load before ranks meet depend on everything that chooses kernels, but not on
// addresses.
void KernelsAreKnownByWhatChoosesThem() {
  alignas(256) static char memory[1024];
  OverlapProblem problem;
  problem.ranks.resize(2);
  problem.ranks[1].lhs = memory;
  const auto of = [&](LtOptions options = {}, uint64_t program = 1) {
    return KernelsOf(program, problem, 1, 1, options);
  };
  const auto plain = of();
  CHECK(of() == plain);
  CHECK(of({true, false, 0}) != plain);
  CHECK(of({false, true, 0}) != plain);
  CHECK(of({false, false, 116}) != plain);
  CHECK(of({}, 2) != plain);
  problem.ranks[1].lhs = memory + 512;
  problem.ranks[0].bias = memory;  // of another device
  CHECK(of() == plain);
  problem.ranks[1].lhs = memory + 16;
  CHECK(of() != plain);
  problem.ranks[1].lhs = memory;
  for (const char** operand : {&problem.ranks[1].bias, &problem.ranks[1].gelu_input}) {
    *operand = memory;
    CHECK(of() != plain);
    *operand = nullptr;
  }
  for (char** result : {&problem.ranks[1].pre_gelu_out, &problem.ranks[1].bias_grad}) {
    *result = memory;
    CHECK(of() != plain);
    *result = nullptr;
  }
  CHECK(of() == plain);
}

// A schedule that waits for a signal that never comes is rejected instead of left hanging.
void AWaitWithoutASignalIsRefused() {
  Signals signals;
  FakeDevice device(&signals);
  Schedule schedule(2);
  schedule.of(1).compute.Wait({0, "chunk 0 arrived"}, 1, 0);
  OverlapTeam team(schedule, 1, 0, 2);
  CHECK(Contains(team.Enqueue("op", &device),
                 "op: rank 1 waits for signal 'chunk 0 arrived' of rank 0, which no rank sends"));
}

const Register kTests("test_overlap_team", [](const Numbers&) {
  for (const int num_ranks : {1, 2, 3, 4}) {
    for (const bool on_one_device : {true, false}) {
      ResultsAreThoseOfAPlainComputation(num_ranks, on_one_device);
    }
  }
  AWaitWithoutASignalIsRefused();
  KernelsAreKnownByWhatChoosesThem();
});

}  // namespace cpd::test_overlap_team
