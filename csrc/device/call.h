// What one call of dispatch or combine is for a GPU: the one parameter of all of its kernels.
#pragma once

#include <cstdint>

#include "device/block.h"
#include "numerics/element.h"
#include "numerics/host_device.h"
#include "numerics/int_array.h"

namespace cpd::device {

constexpr int kMaxRanks = 64;
constexpr int kMaxParts = 4;
constexpr int kMaxArrays = 64;

CPD_HOST_DEVICE inline int64_t AlignUp(int64_t bytes) { return (bytes + 255) & ~int64_t{255}; }

// One array: rows of equal size, one after another; on one device, those of all its ranks.
struct Array {
  const char* in;
  char* out;
  int64_t in_row_bytes;
  int64_t out_row_bytes;
  int64_t data;  // where its rows are in half a channel
  DataType in_type;
  DataType out_type;
};

// Arrays that move as one metadata says.
struct Part {
  IntArray num_recv;    // [W + 1]
  IntArray seq_len;     // [S]
  IntArray dst_rank;    // [S, C]
  IntArray dst_offset;  // [S, C]
  IntArray src_offset;  // [S], or none
  bool has_all_views;   // fields are [W, ...], of which a rank reads its own
  int64_t num_slots;
  int64_t num_replicas;
  int64_t num_tokens;
  int64_t capacity;
  int64_t rows_per_piece;  // what a block moves at a time
  int first_array;
  int num_arrays;
  int64_t tags;        // where the tags of its rows are in half a channel
  int64_t first_slot;  // its slots among those of all parts
};

// What goes wrong on a device, as the host reads it. `raised` counts up on the device and
// `reported` on the host; the first error stays until it has been reported.
enum class Failure : int64_t {
  kNone,
  kRank,       // rank: that of the operand, expected: that of the device
  kLength,     // slot; seen: seq_len, expected: src_offset
  kDstRank,    // slot, replica; seen: dst_rank
  kTokens,     // slot; seen: seq_len, expected: src_offset
  kDstOffset,  // slot, replica; seen: dst_offset
  kCapacity,   // peer; seen: rows needed
  kCounts,     // peer; expected: num_recv, seen: sent
  kOverlap,    // expected: rows sent, seen: rows written
  kPeer,       // peer: whose plan was refused
  kGone,       // peer: that has given up
  kProgram,    // peer: whose call is another one
  kDeadline,   // peer; expected and seen: signals
  kBroken,     // an earlier call failed half way
};

struct ErrorRecord {
  uint64_t raised;
  uint64_t reported;
  Failure failure;
  int64_t part, rank, peer, slot, replica, expected, seen;
  uint64_t epoch;
};

// How far a rank is; in device memory, so that a recorded call can be replayed.
struct State {
  uint64_t epoch;  // of this call; counts from 1
  // 0, or why this call has no result: kRefused, and the next call may go well, or kBroken.
  uint64_t failed;
  uint64_t broken;  // stays
  uint64_t blocks_done;
  uint64_t rows_written[kMaxParts];
  int64_t first_piece[kMaxParts + 1];  // of what this rank sends, part by part
};
enum : uint64_t { kFine, kRefused, kGivenUp };

struct Slot {
  int64_t src_row;
  int64_t num_rows;
  int64_t first_piece;
};

struct Call {
  // The channel's memory of every rank, at the same offsets on each. Two halves, taken in turn.
  char* symmetric[kMaxRanks];
  int64_t half_begin, half_bytes;
  // Of each local rank, local_bytes apart: State, sent [parts, W], then all parts' slots.
  char* local;
  int64_t local_bytes;
  ErrorRecord* errors;          // per local rank; the host reads them
  const int32_t* rank_operand;  // or none
  uint64_t deadline_ns;
  uint64_t program;  // the same on ranks that make the same call
  int num_ranks;
  int first_rank;  // of the local ranks: one, or all of them on one device
  int num_local;
  int num_parts;
  int num_arrays;
  bool is_dispatch;
  Part parts[kMaxParts];
  Array arrays[kMaxArrays];
};

// ---- Where things are. A channel begins with `arrived`: the last call of which each rank has sent
// everything. Each half holds messages [W][2 + parts] (whether the sender failed, its program, and
// how many rows it sent of each part), and for dispatch a tag for each row, then all arrays' rows.

CPD_HOST_DEVICE inline int64_t MessageBytes(const Call& call) { return 8 * (2 + call.num_parts); }

// Fills in the offsets, from the sizes; returns the bytes of a channel per rank.
CPD_HOST_DEVICE inline int64_t LayOutChannel(Call* call) {
  call->half_begin = AlignUp(8 * call->num_ranks);
  int64_t at = AlignUp(call->num_ranks * MessageBytes(*call));
  for (int p = 0; p < call->num_parts; ++p) {
    Part& part = call->parts[p];
    part.tags = at;
    if (call->is_dispatch) at += AlignUp(8 * part.capacity);
  }
  for (int p = 0; p < call->num_parts; ++p) {
    const Part& part = call->parts[p];
    for (int a = part.first_array; a < part.first_array + part.num_arrays; ++a) {
      call->arrays[a].data = at;
      at += AlignUp(part.capacity * call->arrays[a].in_row_bytes);
    }
  }
  call->half_bytes = at;
  return call->half_begin + 2 * at;
}

CPD_HOST_DEVICE inline int64_t LayOutLocal(Call* call) {
  int64_t num_slots = 0;
  for (int p = 0; p < call->num_parts; ++p) {
    call->parts[p].first_slot = num_slots;
    num_slots += call->parts[p].num_slots;
  }
  call->local_bytes = AlignUp(sizeof(State)) + AlignUp(8 * call->num_parts * call->num_ranks) +
                      AlignUp(num_slots * static_cast<int64_t>(sizeof(Slot)));
  return call->num_local * call->local_bytes;
}

// A local rank's view of a call.
struct Rank {
  const Call& call;
  int local;

  CPD_DEVICE int rank() const { return call.first_rank + local; }
  CPD_DEVICE State* state() const {
    return reinterpret_cast<State*>(call.local + local * call.local_bytes);
  }
  CPD_DEVICE uint64_t* sent(int part) const {
    return reinterpret_cast<uint64_t*>(call.local + local * call.local_bytes +
                                       AlignUp(sizeof(State))) +
           part * call.num_ranks;
  }
  CPD_DEVICE Slot* slots(const Part& part) const {
    return reinterpret_cast<Slot*>(call.local + local * call.local_bytes + AlignUp(sizeof(State)) +
                                   AlignUp(8 * call.num_parts * call.num_ranks)) +
           part.first_slot;
  }
  CPD_DEVICE ErrorRecord* error() const { return call.errors + local; }

  // A field of this rank, which has `count` elements per rank.
  CPD_DEVICE IntArray Field(const Part& part, const IntArray& field, int64_t count) const {
    return part.has_all_views ? field.From(static_cast<int64_t>(rank()) * count) : field;
  }

  CPD_DEVICE const char* in(const Part& part, const Array& array) const {
    const int64_t rows = call.is_dispatch ? part.num_tokens : part.capacity;
    return array.in + local * rows * array.in_row_bytes;
  }
  CPD_DEVICE char* out(const Part& part, const Array& array) const {
    const int64_t rows = call.is_dispatch ? part.capacity : part.num_tokens;
    return array.out + local * rows * array.out_row_bytes;
  }
};

// One rank's channel, as anybody sees it.
CPD_DEVICE uint64_t* Arrived(const Call& call, int at, int from) {
  return reinterpret_cast<uint64_t*>(call.symmetric[at]) + from;
}
CPD_DEVICE char* Half(const Call& call, int at, uint64_t epoch) {
  return call.symmetric[at] + call.half_begin + (epoch & 1) * call.half_bytes;
}
CPD_DEVICE uint64_t* Message(const Call& call, int at, uint64_t epoch, int from) {
  return reinterpret_cast<uint64_t*>(Half(call, at, epoch) + from * MessageBytes(call));
}
CPD_DEVICE uint64_t* Tags(const Call& call, int at, uint64_t epoch, const Part& part) {
  return reinterpret_cast<uint64_t*>(Half(call, at, epoch) + part.tags);
}

// Leaves the first error for the host. One thread of a rank calls it at a time.
CPD_DEVICE void RaiseAs(ErrorRecord* record, const ErrorRecord& what, int rank, uint64_t epoch) {
  const uint64_t raised = record->raised;
  if (raised != LoadAcquire(&record->reported)) return;
  record->failure = what.failure;
  record->part = what.part;
  record->rank = rank;
  record->peer = what.peer;
  record->slot = what.slot;
  record->replica = what.replica;
  record->expected = what.expected;
  record->seen = what.seen;
  record->epoch = epoch;
  StoreRelease(&record->raised, raised + 1);
}

CPD_DEVICE void Raise(const Rank& rank, const ErrorRecord& what) {
  RaiseAs(rank.error(), what, rank.rank(), rank.state()->epoch);
}

}  // namespace cpd::device
