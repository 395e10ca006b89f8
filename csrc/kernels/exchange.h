// The signals of a call: one block per rank tells every rank that it has sent, and one block, in
// later kernels, waits for some ranks and then for every rank. No other kernel waits, so none can
// block the GPU.
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
  uint64_t ready;    // senders, by bit
  uint64_t is_over;  // not 0: WaitSome waits no longer
};

// Signals all ranks, even those that receive no row. The signal also acknowledges that this rank
// has read the previous call's rows, whose half the next call overwrites. Data sent over the
// network arrives before any signal, and so do the signals of the last call.
template <typename Fabric = Mapped>
CPD_DEVICE void Signal(const Block& block, const Rank& rank) {
  const Call& call = rank.call;
  const State& state = *rank.state();
  if constexpr (Fabric::kHasNetwork) {
    if (block.thread == 0) Fabric::Quiet();
    block.Sync();
  }
  const bool has_given_up = state.failed == kGivenUp;
  const uint64_t signal = has_given_up ? kGone | state.epoch : state.epoch;
  for (int to = block.thread; to < call.num_ranks; to += block.num_threads) {
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
        continue;
      }
    }
    StoreRelease(arrived, signal);
  }
}

// Called by every block of the kernel that sends: the last one to end signals.
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
  ErrorRecord error{};
  error.peer = from;
  if (arrived < epoch) {
    error.failure = Failure::kDeadline;
    error.expected = static_cast<int64_t>(epoch);
    error.seen = static_cast<int64_t>(arrived);
    return error;
  }
  const uint64_t* message = Message(call, rank.rank(), epoch, from);
  if ((arrived & kGone) || message[0] != kFine) {
    error.failure = arrived & kGone ? Failure::kGone : Failure::kPeer;
    return error;
  }
  if (message[1] != call.program) {
    error.failure = Failure::kProgram;
    return error;
  }
  for (int p = 0; p < call.num_groups; ++p) {
    const OperandGroup& group = call.groups[p];
    const auto plan = static_cast<int64_t>(ChecksumOfPlan(call, p));
    const auto sent = static_cast<int64_t>(message[2 + p]);
    const auto plan_of_peer = static_cast<int64_t>(message[2 + call.num_groups + p]);
    const int64_t announced = rank.Field(group, group.num_recv_tokens, call.num_ranks + 1)[from];
    if (plan == plan_of_peer && announced == sent) continue;
    error.failure = plan == plan_of_peer ? Failure::kCounts : Failure::kPlan;
    error.group = p;
    error.expected = plan == plan_of_peer ? announced : plan;
    error.seen = plan == plan_of_peer ? sent : plan_of_peer;
    return error;
  }
  return error;
}

// When this call's first wait began: all of its waits have one deadline. Ends with a Sync.
CPD_DEVICE uint64_t WaitingSince(const Block& block, State* state) {
  if (block.thread == 0 && state->waiting_since == 0) state->waiting_since = Nanoseconds();
  block.Sync();
  return state->waiting_since;
}

// Waits until half of the senders whose rows have not been taken have signalled: those rows are
// ready. What is wrong is left to Wait, which follows: a message that must be rejected, or the
// deadline, only ends this wait, and the rows of a rejected message are not taken.
CPD_DEVICE void WaitSome(const Block& block, const Rank& rank, MeetScratch* scratch) {
  const Call& call = rank.call;
  State* state = rank.state();
  if (state->failed != kFine) return;  // the same for all threads
  if (block.thread == 0) {
    scratch->ready = scratch->is_over = 0;
    state->taken |= state->ready;
  }
  const uint64_t begin = WaitingSince(block, state);
  const uint64_t taken = state->taken;
  const int num_missing = call.num_ranks - call.num_local - NumBits(taken);
  uint64_t heard = 0;  // by this thread
  for (;;) {
    if (block.thread == 0 && Nanoseconds() - begin >= call.deadline_ns) {
      SetBits(&scratch->is_over, 1);
    }
    for (int from = block.thread; from < call.num_ranks; from += block.num_threads) {
      const uint64_t sender = uint64_t{1} << from;
      if (((taken | heard) & sender) || rank.IsHere(from)) continue;
      const uint64_t arrived = Heard<Mapped>(rank, from);
      if (arrived < state->epoch) continue;
      heard |= sender;
      const bool is_good = CheckPeer(rank, from, arrived).failure == Failure::kNone;
      SetBits(is_good ? &scratch->ready : &scratch->is_over, sender);
    }
    block.Sync();
    const uint64_t ready = scratch->ready;
    const bool is_over = scratch->is_over != 0 || 2 * NumBits(ready) >= num_missing;
    block.Sync();  // before the next turn adds to them
    if (is_over) {
      if (block.thread == 0) state->ready = ready;
      return;
    }
    Pause();
  }
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
    state->taken |= state->ready;
    state->ready = ~state->taken;
  }
  const uint64_t begin = WaitingSince(block, state);
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
