// How ranks on several GPUs meet in one overlapped GEMM, as a block runs it: all begin, then signal
// one another. A signal is the number of the call and only grows.
//
// A rank announces call e when its stream has finished e - 1. A rank that has received
// this from all ranks may write to their buffers. Nothing is ever reset.
//
// A call begins when the one before it on this device has ended, also if nothing else orders them.
#pragma once

#include "kernels/block.h"
#include "kernels/call.h"
#include "kernels/exchange.h"

namespace cpd::kernels {

// One rank's side of a call. A rank's memory starts with began [W], programs [2][W], signals. The
// programs of two calls are separate: a rank may begin the next call before another has read them.
struct Meeting {
  char* symmetric[kMaxRanks];
  State* state;
  ErrorRecord* error;
  const int32_t* rank_operand;
  uint64_t deadline_ns;
  uint64_t program;  // the same on ranks that run the same call; see ProgramWord
  int num_ranks;
  int rank;
};

CPD_HOST_DEVICE inline int64_t MeetingBytes(int num_ranks, int num_signals) {
  return AlignUp(8 * (3 * static_cast<int64_t>(num_ranks) + num_signals));
}

CPD_DEVICE uint64_t* Began(const Meeting& m, int at, int from) {
  return reinterpret_cast<uint64_t*>(m.symmetric[at]) + from;
}
CPD_DEVICE uint64_t* Program(const Meeting& m, int at, int from) {
  return Began(m, at, (1 + (m.state->epoch & 1)) * m.num_ranks + from);
}
CPD_DEVICE uint64_t* SignalOf(const Meeting& m, int at, int signal) {
  return Began(m, at, 3 * m.num_ranks + signal);
}

CPD_DEVICE void Fail(const Meeting& m, Failure failure, int peer, uint64_t seen) {
  const uint64_t expected = failure == Failure::kProgram ? m.program : m.state->epoch;
  ErrorRecord error =
      ErrorOf(failure, static_cast<int64_t>(expected), static_cast<int64_t>(seen & ~kGone));
  error.peer = peer;
  RaiseAs(m.error, error, m.rank, m.state->epoch);
}

// The word for this call: its number, and whether this rank has given up.
CPD_DEVICE uint64_t Told(const Meeting& m) {
  return m.state->failed == kGivenUp ? kGone | m.state->epoch : m.state->epoch;
}

// Waits until a word has reached this call. Returns the failure, if any.
CPD_DEVICE Failure WaitForWord(const Meeting& m, const uint64_t* word, uint64_t* seen) {
  const uint64_t begin = Nanoseconds(), epoch = m.state->epoch;
  while ((*seen = LoadAcquire(word)) < epoch) {
    if (Nanoseconds() - begin >= m.deadline_ns) return Failure::kDeadline;
    Pause();
  }
  return *seen & kGone ? Failure::kGone : Failure::kNone;
}

struct BeginScratch {
  uint64_t first_bad;
};

// Counts a call, and waits until the one before it has ended; false after the deadline. Run by one
// thread.
CPD_DEVICE bool TakeTurn(const Meeting& m) {
  const uint64_t begin = Nanoseconds(), turn = AddAndFetch(&m.state->begun, 1);
  bool is_free = true;
  while (is_free && LoadAcquire(&m.state->finished) + 1 < turn) {
    is_free = Nanoseconds() - begin < m.deadline_ns;
    Pause();
  }
  m.state->epoch = turn;
  return is_free;
}

// The first kernel of a call: one thread per rank. A rank that gives up halfway cannot know what
// the others did since, so the buffer cannot be used again.
CPD_DEVICE void Begin(const Block& block, const Meeting& m, BeginScratch* scratch) {
  if (block.thread == 0) {
    scratch->first_bad = kNowhere;
    const bool is_free = TakeTurn(m);
    m.state->failed = m.state->broken ? kGivenUp : kFine;
    m.state->blocks_done = 0;
    if (m.state->broken) {
      Fail(m, Failure::kBroken, m.rank, 0);
    } else if (!is_free) {
      Fail(m, Failure::kDeadline, m.rank, m.state->finished);
      m.state->failed = kGivenUp;
    } else if (m.rank_operand && *m.rank_operand != m.rank) {
      Fail(m, Failure::kRank, m.rank, *m.rank_operand);
      m.state->failed = kGivenUp;
    }
  }
  block.Sync();
  const bool has_failed = m.state->failed == kGivenUp;
  for (int to = block.thread; to < m.num_ranks; to += block.num_threads) {
    *Program(m, to, m.rank) = m.program;
    StoreRelease(Began(m, to, m.rank), Told(m));
  }
  block.Sync();
  Failure failure = Failure::kNone;
  uint64_t seen = 0;
  int peer = 0;
  for (int from = block.thread; from < m.num_ranks && !has_failed; from += block.num_threads) {
    if (failure != Failure::kNone) break;
    peer = from;
    failure = WaitForWord(m, Began(m, m.rank, from), &seen);
    if (failure == Failure::kNone && *Program(m, m.rank, from) != m.program) {
      failure = Failure::kProgram;
      seen = *Program(m, m.rank, from);
    }
    if (failure != Failure::kNone) Lower(&scratch->first_bad, from);
  }
  block.Sync();
  if (failure != Failure::kNone && static_cast<uint64_t>(peer) == scratch->first_bad) {
    Fail(m, failure, peer, seen);
  }
  if (block.thread == 0 && (has_failed || scratch->first_bad != kNowhere)) {
    m.state->failed = kGivenUp;
    m.state->broken = 1;
  }
}

// Earlier work on the stream is visible to a rank that has seen the signal. Run by one thread.
CPD_DEVICE void Tell(const Meeting& m, int peer, int signal) {
  StoreRelease(SignalOf(m, peer, signal), Told(m));
}

// Run by one thread. Rank `peer` signals.
CPD_DEVICE void WaitFor(const Meeting& m, int peer, int signal) {
  if (m.state->failed == kGivenUp) return;
  uint64_t seen = 0;
  const Failure failure = WaitForWord(m, SignalOf(m, m.rank, signal), &seen);
  if (failure == Failure::kNone) return;
  m.state->failed = kGivenUp;
  if (AddAndFetch(&m.state->broken, 1) == 1) Fail(m, failure, peer, seen);  // of both streams
}

// The results of a call.
struct MeetingResults {
  static constexpr int kMost = 4;
  State* state;
  char* data[kMost];
  int64_t num_bytes[kMost];
};

// The last kernel of a call. Fills the results of a failed one with NaN, for every float type:
// bytes 0xff.
CPD_DEVICE void End(const Block& block, const MeetingResults& results) {
  State* state = results.state;
  for (int r = 0; r < MeetingResults::kMost && state->failed != kFine; ++r) {
    for (int64_t i = block.index * int64_t{block.num_threads} + block.thread;
         i < results.num_bytes[r]; i += int64_t{block.num_blocks} * block.num_threads) {
      results.data[r][i] = static_cast<char>(0xff);
    }
  }
  block.Sync();
  if (block.thread == 0 &&
      AddAndFetch(&state->blocks_done, 1) == static_cast<uint64_t>(block.num_blocks)) {
    StoreRelease(&state->finished, state->epoch);
  }
}

}  // namespace cpd::kernels
