// Overlapped GEMMs hide their communication, as a virtual clock and the order of events show;
// recorded spans show it too; ranks that fail or are late are named.
#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <mutex>
#include <stdexcept>

#include "native_test.h"
#include "overlap_call.h"
#include "overlap_problems.h"
#include "transport/team.h"
#include "virtual_time.h"

namespace cpd::test_overlap_timing {

// Two rows of each rank.
std::vector<int64_t> Counts(int num_ranks) { return std::vector<int64_t>(num_ranks, 2); }

// ---- Overlap on a virtual clock. A rank's GEMM and its communication take given times.

struct Times {
  double gemm, communication;  // of one rank, in seconds
  double longer() const { return std::max(gemm, communication); }
  double bound() const { return 1.15 * longer(); }
};

double SecondsOf(const OverlapProblem& problem, Times times) {
  const Call call(problem);
  const OverlapProblem& p = call.problem();
  const double flops = static_cast<double>(p.m * p.n * p.k);
  const auto gemm = [=](const GemmTask& task) {
    VirtualStreams::Pass(times.gemm * static_cast<double>(task.m * task.n * task.k) / flops);
  };
  // A rank's own rows cross no link; all others are one chunk for each of its peers.
  const int64_t width = p.config.method == CommMethod::kBulk    ? p.aux_width
                        : p.config.type == CommType::kAllGather ? p.k
                                                                : p.n;
  const double all = static_cast<double>((p.num_ranks() - 1) * p.rows.counts[0] * width) *
                     static_cast<double>(sizeof(float));
  const auto put = [=, &call](const std::vector<RowCopy>& copies) {
    double bytes = 0;
    for (const RowCopy& copy : copies) {
      if (call.RankOf(copy.from) == call.RankOf(copy.to)) continue;
      bytes += static_cast<double>(copy.num_rows * copy.row_bytes);
    }
    return times.communication * bytes / all;
  };
  const auto core = MakeCommOverlap(p, std::make_shared<HostArithmetic>(gemm));
  VirtualStreams streams(core->Record(), core->num_signals(),
                         {put, times.communication / call.num_reads_expected()});
  const bool reads =
      p.config.type == CommType::kReduceScatter && p.config.method != CommMethod::kRingExchange;
  for (int rank = 0; rank < p.num_ranks(); ++rank) {
    CHECK(streams.num_reads(rank) == (reads ? call.num_reads_expected() : 0));
  }
  return streams.Run();
}

constexpr Times kTimes[] = {{1, 1}, {1, 0.5}, {0.5, 1}};

// ---- Overlap by the order of events, on the threads of a team: one product and one communication
// step of each rank must be in progress at the same time, or both wait for each other until the
// deadline.

class Meetings {
 public:
  // The product and the step of each rank, counted from 1.
  Meetings(int num_ranks, int product, int step)
      : product_(product), step_(step), of_rank_(num_ranks) {}

  void Multiply(int rank) { Meet(rank, product_, &OfRank::num_products, &OfRank::multiplies); }
  void Communicate(int rank) { Meet(rank, step_, &OfRank::num_steps, &OfRank::communicates); }
  bool AllMet() const {
    return std::all_of(of_rank_.begin(), of_rank_.end(),
                       [](const OfRank& rank) { return rank.has_met; });
  }

 private:
  struct OfRank {
    int num_products = 0, num_steps = 0;
    bool multiplies = false, communicates = false, has_met = false;
  };

  void Meet(int rank, int which, int OfRank::* count, bool OfRank::* begun) {
    std::unique_lock<std::mutex> lock(mutex_);
    OfRank& mine = of_rank_[rank];
    if (++(mine.*count) != which) return;
    mine.*begun = true;
    changed_.notify_all();
    mine.has_met = changed_.wait_for(lock, std::chrono::seconds(50),
                                     [&] { return mine.multiplies && mine.communicates; });
  }

  const int product_, step_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<OfRank> of_rank_;
};

StandIns MeetIn(const Call& call, Meetings* meetings) {
  StandIns stand_ins;
  stand_ins.gemm = [&call, meetings](const GemmTask& task) {
    meetings->Multiply(call.RankOf(task.c));
    PlainGemm(task);
  };
  stand_ins.link = [&call, meetings](const std::vector<RowCopy>& copies) {
    meetings->Communicate(call.RankOf(copies[0].from));
    CopyRows(copies);
  };
  stand_ins.read = [meetings](int rank) { meetings->Communicate(rank); };
  return stand_ins;
}

void CommunicationIsHidden(const char* name, const OverlapProblem& problem, int product, int step) {
  for (const Times times : kTimes) {
    const double seconds = SecondsOf(problem, times);
    if (seconds <= times.bound() && seconds >= times.longer() - 1e-9) continue;
    std::fprintf(stderr, "%s: GEMM %g s, communication %g s, together %g s\n", name, times.gemm,
                 times.communication, seconds);
    CHECK(seconds <= times.bound() && seconds >= times.longer() - 1e-9);
  }
  const Call call(problem);
  Meetings meetings(problem.num_ranks(), product, step);
  CHECK(call.Run(MeetIn(call, &meetings)).ok());
  CHECK(meetings.AllMet());
  CHECK(call.IsRight());
}

// The control: communication that is not hidden shows.
void NothingIsHiddenWithoutOverlap(CommType type) {
  for (const Times times : kTimes) {
    const double seconds = SecondsOf(Problem(type, CommMethod::kNone, Counts(8)), times);
    CHECK(std::abs(seconds - (times.gemm + times.communication)) < 1e-9);
  }
}

void EveryOverlappedMethodHidesItsCommunication() {
  constexpr CommType kGather = CommType::kAllGather, kReduce = CommType::kReduceScatter;
  for (const CommType type : {kGather, kReduce}) {
    const bool gathers = type == kGather;
    NothingIsHiddenWithoutOverlap(type);
    CommunicationIsHidden(gathers ? "bulk AG" : "bulk RS",
                          Problem(type, CommMethod::kBulk, Counts(8)), 1, 1);
    // The first addend is computed before it is sent.
    OverlapProblem ring = Problem(type, CommMethod::kRingExchange, Counts(8));
    CommunicationIsHidden(gathers ? "ring AG" : "ring RS", ring, gathers ? 1 : 2, 1);
    ring.config.atomic = true;
    CommunicationIsHidden(gathers ? "atomic ring AG" : "atomic ring RS", ring, gathers ? 1 : 2, 1);
  }
  // The swap at the beginning is exposed, 1/(p-1) of the communication, and so are the last two
  // chunks' products: more ranks, to be within the bound. Two puts come before the first product.
  OverlapProblem pairs = Problem(kGather, CommMethod::kRingExchange, Counts(24));
  pairs.config.aggregate = true;
  CommunicationIsHidden("aggregated ring AG", pairs, 1, 3);

  OverlapProblem pipeline = Problem(kReduce, CommMethod::kPipeline, Counts(8));
  pipeline.n = pipeline.config.num_splits = 16;
  CommunicationIsHidden("pipeline RS", pipeline, 2, 1);
  pipeline.config.atomic = true;
  CommunicationIsHidden("atomic pipeline RS", pipeline, 2, 1);
  pipeline.config.atomic = false;
  // The last two chunks are reduced when no product is left.
  pipeline.config.overlap_first_gemm = true;
  pipeline.n = pipeline.config.num_splits = 32;
  CommunicationIsHidden("pipeline RS, first GEMM overlapped", pipeline, 3, 1);
}

// ---- Spans.

void SpansShowTheOverlap() {
  constexpr int kRanks = 4;
  const Call call(
      Problem(CommType::kAllGather, CommMethod::kRingExchange, std::vector<int64_t>(kRanks, 2)));
  Meetings meetings(kRanks, /*product=*/1, /*step=*/1);
  SpanRecorder::Get().Start();
  CHECK(call.Run(MeetIn(call, &meetings)).ok() && meetings.AllMet());
  const std::vector<RecordedSpan> spans = SpanRecorder::Get().Stop();
  CHECK(spans.size() == kRanks * (kRanks + kRanks - 1));
  int num_overlaps = 0;
  for (int rank = 0; rank < kRanks; ++rank) {
    std::vector<std::string> names[2];
    for (const RecordedSpan& span : spans) {
      CHECK(span.op == "test" && span.group == 7 && span.duration_ns >= 0);
      if (span.rank != rank) continue;
      names[static_cast<int>(span.kind)].push_back(span.name);
      for (const RecordedSpan& other : spans) {
        num_overlaps += other.rank == rank && span.kind == SpanKind::kComputation &&
                        other.kind == SpanKind::kCommunication &&
                        span.start_ns <= other.start_ns + other.duration_ns &&
                        other.start_ns <= span.start_ns + span.duration_ns;
      }
    }
    for (int step = 0; step < kRanks; ++step) {
      const std::string chunk = std::to_string((rank - step + kRanks) % kRanks);
      CHECK(names[0][step] == "GEMM " + chunk);
      if (step < kRanks - 1) CHECK(names[1][step] == "send " + chunk);
    }
  }
  CHECK(num_overlaps >= kRanks);  // those that have met
  CHECK(call.Run().ok());
  CHECK(SpanRecorder::Get().Stop().empty());  // it was stopped before
}

// ---- Failures.

// Ranks that wait for it are notified at once, before the deadline.
void AThrowingGemmFailsTheCall() {
  for (const OverlapProblem& problem : AllProblems({2, 1, 2, 1})) {
    const Call call(problem);
    StandIns stand_ins;
    stand_ins.deadline = std::chrono::hours(24);
    stand_ins.gemm = [&call](const GemmTask& task) {
      if (call.RankOf(task.c) == 2) throw std::runtime_error("out of paper");
      PlainGemm(task);
    };
    const Status status = call.Run(stand_ins);
    CHECK(status.code == StatusCode::kInternal);
    CHECK(status.message == "test: rank 2 threw out of paper");
  }
}

// Opens once and stays open.
class Gate {
 public:
  void Open() {
    std::lock_guard<std::mutex> lock(mutex_);
    is_open_ = true;
    changed_.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return is_open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
};

// The product of rank 1 is not done before another stream has given up.
void ASlowGemmIsNamed(const OverlapProblem& problem, const char* message) {
  const Call call(problem);
  Gate has_failed;
  StandIns stand_ins;
  stand_ins.deadline = milliseconds(100);
  stand_ins.gemm = [&](const GemmTask& task) {
    if (call.RankOf(task.b.data) == 1) has_failed.Wait();
  };
  stand_ins.failed = [&] { has_failed.Open(); };
  const Status status = call.Run(stand_ins);
  CHECK(status.code == StatusCode::kDeadlineExceeded);
  CHECK(status.message.rfind("test: rank ", 0) == 0);
  CHECK(Contains(status, message));
}

// What rank 0 sends does not arrive before rank 1 has given up. Rank 0 itself does not wait: what
// it needs is available when it starts.
void ASlowLinkIsNamed() {
  const Call call(Problem(CommType::kAllGather, CommMethod::kRingExchange, {2, 2}));
  Gate has_arrived, has_failed;
  StandIns stand_ins;
  stand_ins.deadline = milliseconds(500);
  stand_ins.gemm = [&](const GemmTask& task) {
    if (call.RankOf(task.c) == 0) has_arrived.Wait();
  };
  stand_ins.link = [&](const std::vector<RowCopy>& copies) {
    if (call.RankOf(copies[0].to) == 1) {
      has_failed.Wait();
    } else {
      has_arrived.Open();
    }
    CopyRows(copies);
  };
  stand_ins.failed = [&] { has_failed.Open(); };
  CHECK(Contains(call.Run(stand_ins),
                 "test: rank 1 waited 500 ms for rank 0, signal 'chunk 0 arrived': expected 1, "
                 "seen 0."));
}

void SlowRanksAreNamed() {
  constexpr CommType kReduce = CommType::kReduceScatter;
  const auto problem = [](CommMethod method) { return Problem(kReduce, method, {2, 2}); };
  ASlowGemmIsNamed(problem(CommMethod::kNone),
                   "rank 0 waited 100 ms for rank 1, signal 'chunk 0 computed': expected 1, "
                   "seen 0.");
  // Here the stream of rank 1 that communicates waits for the one that computes, too.
  ASlowGemmIsNamed(problem(CommMethod::kPipeline),
                   "waited 100 ms for rank 1, signal 'chunk 0 computed': expected 1, seen 0.");
  ASlowGemmIsNamed(problem(CommMethod::kRingExchange), "waited 100 ms for rank 1, signal 'chunk ");
  ASlowLinkIsNamed();
}

const Register kTests("test_overlap_timing", [](const Numbers&) {
  SpansShowTheOverlap();
  AThrowingGemmFailsTheCall();
  SlowRanksAreNamed();
  EveryOverlappedMethodHidesItsCommunication();
});

}  // namespace cpd::test_overlap_timing
