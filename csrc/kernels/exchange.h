// The signals of a call: a rank tells every rank that it has sent, and one block, in a later
// kernel, waits for every rank. No other kernel waits, so none can block the GPU.
#pragma once

#include "kernels/block.h"
#include "kernels/call.h"
#include "kernels/plan.h"

namespace cpd::kernels {

// Added to the signal of a rank that has given up: the signal still grows, and one word says both.
constexpr uint64_t kGone = uint64_t{1} << 63;

struct MeetScratch {
  uint64_t first_bad;
  uint64_t is_broken;
};

// Tells a rank that everything for it has left, or that this rank has given up. Run by one thread.
// A rank that receives no row is told too. The signal also acknowledges that this rank has read the
// previous call's rows, whose half the next call overwrites.
template <typename Fabric>
CPD_DEVICE void SignalTo(const Rank& rank, int to) {
  const Call& call = rank.call;
  const State& state = *rank.state();
  const bool has_given_up = state.failed == kGivenUp;
  const uint64_t signal = has_given_up ? kGone | state.epoch : state.epoch;
  uint64_t* arrived = Arrived(call, to, rank.rank());
  uint64_t* message = Message(call, to, state.epoch, rank.rank());
  uint64_t* written = IsRemote<Fabric>(call, to) ? StagedMessage(rank, to) : message;
  if (!has_given_up) {
    written[0] = state.failed;
    written[1] = call.program;
    for (int p = 0; p < call.num_groups; ++p) {
      written[2 + p] = rank.sent(p)[to];
      written[2 + call.num_groups + p] = ChecksumOfPlan(call, p);
    }
  }
  if constexpr (Fabric::kHasNetwork) {
    if (IsRemote<Fabric>(call, to)) {
      if (has_given_up) {
        Fabric::SetSignal(arrived, signal, call.pe[to]);
      } else {
        Fabric::PutSignal(message, written, MessageBytes(call), arrived, signal, call.pe[to]);
      }
      return;
    }
  }
  StoreRelease(arrived, signal);
}

// Signals all ranks. Data sent over the network arrives before any signal, and so do the signals of
// the last call.
template <typename Fabric = Mapped>
CPD_DEVICE void Signal(const Block& block, const Rank& rank) {
  if constexpr (Fabric::kHasNetwork) {
    if (block.thread == 0) Fabric::Quiet();
    block.Sync();
  }
  for (int to = block.thread; to < rank.call.num_ranks; to += block.num_threads) {
    SignalTo<Fabric>(rank, to);
  }
}

// Called by every block of a kernel after which all ranks are signalled: the last one to end does.
CPD_DEVICE void SignalLast(const Block& block, const Rank& rank, bool* is_last) {
  block.Sync();
  if (block.thread == 0) {
    const auto num_blocks = static_cast<uint64_t>(block.num_blocks);
    *is_last = AddAndFetch(&rank.state()->blocks_sent, 1) == num_blocks;
  }
  block.Sync();
  if (*is_last) Signal(block, rank);
}

// The last signal of a rank. If it belongs to this call, everything sent before it is visible.
template <typename Fabric>
CPD_DEVICE uint64_t Heard(const Rank& rank, int from) {
  uint64_t* arrived = Arrived(rank.call, rank.rank(), from);
  const uint64_t seen = LoadAcquire(arrived);
  if constexpr (Fabric::kHasNetwork) {
    const uint64_t epoch = rank.state()->epoch;
    if (seen >= epoch && IsRemote<Fabric>(rank.call, from)) Fabric::Observe(arrived, epoch);
  }
  return seen;
}

// The error in the message of `from`, if any; `arrived` is its last signal.
CPD_DEVICE ErrorRecord CheckPeer(const Rank& rank, int from, uint64_t arrived) {
  const Call& call = rank.call;
  const uint64_t epoch = rank.state()->epoch;
  const auto error_of = [&](Failure failure, uint64_t expected = 0, uint64_t seen = 0) {
    ErrorRecord error =
        ErrorOf(failure, static_cast<int64_t>(expected), static_cast<int64_t>(seen));
    error.peer = from;
    return error;
  };
  if (arrived < epoch) return error_of(Failure::kDeadline, epoch, arrived);
  const uint64_t* message = Message(call, rank.rank(), epoch, from);
  if ((arrived & kGone) || message[0] != kFine) {
    return error_of(arrived & kGone ? Failure::kGone : Failure::kPeer);
  }
  if (message[1] != call.program) return error_of(Failure::kProgram, call.program, message[1]);
  for (int p = 0; p < call.num_groups; ++p) {
    const OperandGroup& group = call.groups[p];
    const uint64_t plan = ChecksumOfPlan(call, p), plan_of_peer = message[2 + call.num_groups + p];
    const auto announced =
        static_cast<uint64_t>(rank.Field(group, group.num_recv_tokens, call.num_ranks + 1)[from]);
    if (plan == plan_of_peer && announced == message[2 + p]) continue;
    ErrorRecord error = plan == plan_of_peer ? error_of(Failure::kCounts, announced, message[2 + p])
                                             : error_of(Failure::kPlan, plan, plan_of_peer);
    error.group = p;
    return error;
  }
  return {};
}

// A rank whose plan was rejected waits too: it must not begin the next call before the others have
// read the last one.
template <typename Fabric = Mapped>
CPD_DEVICE void Wait(const Block& block, const Rank& rank, MeetScratch* scratch) {
  const Call& call = rank.call;
  State* state = rank.state();
  const uint64_t failed = state->failed;  // the same for all threads
  if (failed == kGivenUp) return;
  if (block.thread == 0) {
    scratch->first_bad = kNowhere;
    scratch->is_broken = 0;
  }
  block.Sync();
  const uint64_t begin = Nanoseconds();
  ErrorRecord mine{};
  for (int from = block.thread; from < call.num_ranks; from += block.num_threads) {
    uint64_t arrived;
    while ((arrived = Heard<Fabric>(rank, from)) < state->epoch &&
           Nanoseconds() - begin < call.deadline_ns) {
      Pause();
    }
    const ErrorRecord error = CheckPeer(rank, from, arrived);
    // A rank that gives up halfway cannot know what the others did since: the channel cannot be
    // used again.
    const bool is_broken = error.failure == Failure::kDeadline || error.failure == Failure::kGone;
    if (error.failure == Failure::kNone || (failed == kRefused && !is_broken)) continue;
    if (mine.failure == Failure::kNone) mine = error;
    Lower(&scratch->first_bad, from);
    if (is_broken) Add(&scratch->is_broken, 1);
  }
  block.Sync();
  if (scratch->first_bad == kNowhere) return;
  if (mine.failure != Failure::kNone && mine.peer == static_cast<int64_t>(scratch->first_bad)) {
    Raise(rank, mine);
  }
  if (block.thread == 0) {
    state->broken = scratch->is_broken != 0;
    state->failed = state->broken ? kGivenUp : kRefused;
  }
}

}  // namespace cpd::kernels
