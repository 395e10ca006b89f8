// One call of dispatch or combine on a GPU: the single parameter of all of its kernels.
#pragma once

#include <cstdint>

#include "kernels/block.h"
#include "numerics/element.h"

namespace cpd::kernels {

constexpr int kMaxRanks = 64;
constexpr int kMaxOperandGroups = 4;
constexpr int kMaxArrays = 64;
constexpr int kTagRun = 1024;  // tags that one put sends over the network
constexpr int64_t kFingerprintSize = 9;
// The plan's rank in a fallback, of tokens out of order, and of a wrong mask; see
// dispatch/dispatch.h.
constexpr int64_t kNoRank = -1, kOutOfOrder = -2, kWrongMask = -3;

CPD_HOST_DEVICE inline int64_t AlignUp(int64_t bytes) { return (bytes + 255) & ~int64_t{255}; }

// One array: consecutive rows of equal size; on one device, those of all its ranks.
struct Array {
  const char* in;
  char* out;
  int64_t in_row_bytes;
  int64_t out_row_bytes;
  int64_t data;    // offset of its rows in half a channel
  int64_t staged;  // offset of its staged rows in a channel
  DataType in_type;
  DataType out_type;
};

// Arrays that move by the same metadata.
struct OperandGroup {
  IntArray num_recv_tokens;  // [W + 1]
  IntArray seq_len;          // [S]
  IntArray dst_rank;         // [S, C]
  IntArray dst_offset;       // [S, C]
  IntArray src_offset;       // [S], or absent
  IntArray fingerprint;      // [kFingerprintSize] of this rank, or absent; see dispatch/dispatch.h
  bool has_all_views;        // fields are [W, ...]; each rank reads its own
  int64_t num_slots;
  int64_t num_replicas;
  int64_t num_tokens;
  int64_t capacity;
  int64_t rows_per_strip;  // that a block moves at a time; in a small call all
  int64_t rows_per_push;   // the same when it pushes; in a small call those of a warp
  int first_array;
  int num_arrays;
  int64_t tags;         // offset of the tags of its rows in half a channel
  int64_t staged_rows;  // of each array: sent ones for dispatch, fetched ones for combine
  int64_t first_slot;   // offset of its slots among those of all groups
};

// An error found on a device, as the host reads it. The device increments `raised`, the host
// `reported`; the first error stays until it has been reported.
enum class Failure : int64_t {
  kNone,
  kRank,     // rank: that of the operand, expected: that of the device
  kBatch,    // slot: 0 rank, 1 segment ids, 2 positions, 3 mask; expected by the plan, seen by the
             // rank
  kLength,   // slot; seen: seq_len, expected: src_offset
  kDstRank,  // slot, replica; seen: dst_rank
  kTokens,   // slot; seen: seq_len, expected: src_offset
  kDstOffset,  // slot, replica; seen: dst_offset
  kCapacity,   // peer; seen: rows needed
  kFetched,    // expected: rows that can be fetched, seen: rows to fetch
  kCounts,     // peer; expected: num_recv_tokens, seen: sent
  kPlan,       // peer; checksums of plans. expected: of this rank, seen: of the peer
  kOverlap,    // expected: rows sent, seen: rows written
  kPeer,       // peer: its plan was rejected
  kGone,       // peer: it has given up
  kProgram,    // peer: it runs another call; expected and seen: program words
  kDeadline,   // peer; expected and seen: signals
  kBroken,     // an earlier call failed halfway
};

// What ranks compare: what a call is, and its number in the program. A positive int64.
constexpr int kSiteBits = 16;  // JAX counts no further
CPD_HOST_DEVICE inline uint64_t ProgramWord(uint64_t hash, int64_t site) {
  return (hash << (kSiteBits + 1) >> 1) | (static_cast<uint64_t>(site) & ((1 << kSiteBits) - 1));
}
CPD_HOST_DEVICE inline int64_t SiteOf(int64_t word) { return word & ((1 << kSiteBits) - 1); }

struct ErrorRecord {
  uint64_t raised;
  uint64_t reported;
  Failure failure;
  int64_t group, rank, peer, slot, replica, expected, seen;
  uint64_t epoch;
};

CPD_HOST_DEVICE inline ErrorRecord ErrorOf(Failure failure, int64_t expected = 0,
                                           int64_t seen = 0) {
  ErrorRecord error{};
  error.failure = failure;
  error.expected = expected;
  error.seen = seen;
  return error;
}

// The progress of a rank. In device memory, so that a recorded call can be replayed.
struct State {
  uint64_t epoch;  // of this call; starts at 1
  // 0, or why this call has no result: kRefused (the next call may succeed) or kBroken.
  uint64_t failed;
  uint64_t broken;                    // permanent
  uint64_t blocks_sent, blocks_done;  // that have pushed, and unpacked or ended
  uint64_t begun, finished;           // of a meeting: calls that have arrived here, and that ended
  uint64_t rows_written[kMaxOperandGroups];
  int64_t first_strip[kMaxOperandGroups + 1];  // rows that this rank sends, by group
  uint64_t strips_left[kMaxRanks];             // that each rank has yet to get; see push_take.h
  // Small calls so far; only grow. Of the first local rank: parts that blocks have drawn.
  uint64_t parts_drawn;
  uint64_t parts_sent;  // of this rank: those that have ended
};
enum : uint64_t { kFine, kRefused, kGivenUp };

struct Slot {
  int64_t src_row;
  int64_t num_rows;
  int64_t first_strip;
};

struct Call {
  // The channel memory of every rank, at the same offsets on each: two halves, used in turn. For a
  // remote rank, whose memory is not mapped here, this rank's own.
  char* symmetric[kMaxRanks];
  bool has_network;       // some ranks are remote to others; equal on all ranks
  int32_t pe[kMaxRanks];  // the network's number of a remote rank; -1: it is mapped
  int64_t half_begin, half_bytes;
  int64_t staged_messages, staged_tags;  // in a channel
  // For each local rank, local_bytes apart: State, sent [groups, W], then the slots of all groups;
  // with a network, the start of the rows that are fetched for each slot.
  char* local;
  int64_t local_bytes, first_fetched;
  ErrorRecord* errors;          // per local rank; the host reads them
  const int32_t* rank_operand;  // or nullptr
  uint64_t deadline_ns;
  uint64_t program;  // the same on ranks that run the same call; see ProgramWord
  int num_ranks;
  int first_rank;  // local ranks: one, or all of them on one device
  int num_local;
  int num_groups;
  int num_arrays;
  bool is_small;  // one kernel; see small.h
  bool is_dispatch;
  OperandGroup groups[kMaxOperandGroups];
  Array arrays[kMaxArrays];
};

// ---- Layout. A channel begins with `arrived`: for each rank, the last call of which it has sent
// everything. Each half holds messages [W][2 + groups] (whether the sender failed, its program, and
// the rows it sent of each group), for dispatch a tag per row, then the rows of all arrays, unless
// one device holds all ranks. With a network, a staging area follows that only its own rank and the
// network access: messages [W], for dispatch a run of tags, then the rows of all arrays.

// Whether one device holds all ranks. Their rows then pass through no channel.
CPD_HOST_DEVICE inline bool HoldsAllRanks(const Call& call) {
  return call.num_local == call.num_ranks;
}

// The tag of a row: the call in which it was written, and its sender; or that it is in the result
// already, as rows for a rank of the sender's device are, and rows that were taken. Epochs that
// differ by 2^57 look alike.
constexpr uint64_t kInPlace = uint64_t{1} << 63;
constexpr int kSenderBit = 57;
constexpr uint64_t kEpochOfTag = (uint64_t{1} << kSenderBit) - 1;
static_assert(kMaxRanks <= 64);  // senders fit a tag

CPD_HOST_DEVICE inline uint64_t TagOf(uint64_t epoch, int sender) {
  return (epoch & kEpochOfTag) | static_cast<uint64_t>(sender) << kSenderBit;
}
CPD_HOST_DEVICE inline uint64_t TagInPlace(uint64_t epoch) {
  return (epoch & kEpochOfTag) | kInPlace;
}
CPD_HOST_DEVICE inline int SenderOf(uint64_t tag) {
  return static_cast<int>((tag & ~kInPlace) >> kSenderBit);
}

// Two words, the rows sent of each group, and the checksum of each group's plan.
CPD_HOST_DEVICE inline int64_t MessageBytes(const Call& call) {
  return 8 * (2 + 2 * call.num_groups);
}

// Appends the staging area to a channel of `at` bytes.
CPD_HOST_DEVICE inline int64_t LayOutStaging(Call* call, int64_t at) {
  call->staged_messages = at;
  at += AlignUp(call->num_ranks * MessageBytes(*call));
  call->staged_tags = at;
  if (call->is_dispatch) at += AlignUp(8 * kTagRun);
  for (int p = 0; p < call->num_groups; ++p) {
    OperandGroup& group = call->groups[p];
    const int64_t named = group.num_tokens * group.num_replicas;  // for slots that do not overlap
    const int64_t held = group.capacity * call->num_ranks;
    group.staged_rows = call->is_dispatch                   ? group.num_tokens
                        : named < held && !group.src_offset ? named
                                                            : held;
    for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
      call->arrays[a].staged = at;
      at += AlignUp(group.staged_rows * call->arrays[a].in_row_bytes);
    }
  }
  return at;
}

// Computes the offsets from the sizes; returns the bytes of a channel per rank.
CPD_HOST_DEVICE inline int64_t LayOutChannel(Call* call) {
  call->half_begin = AlignUp(8 * call->num_ranks);
  int64_t at = AlignUp(call->num_ranks * MessageBytes(*call));
  for (int p = 0; p < call->num_groups; ++p) {
    OperandGroup& group = call->groups[p];
    group.tags = at;
    if (call->is_dispatch) at += AlignUp(8 * group.capacity);
  }
  for (int p = 0; p < call->num_groups; ++p) {
    const OperandGroup& group = call->groups[p];
    for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
      call->arrays[a].data = at;
      if (!HoldsAllRanks(*call)) at += AlignUp(group.capacity * call->arrays[a].in_row_bytes);
    }
  }
  call->half_bytes = at;
  at = call->half_begin + 2 * at;
  return call->has_network ? LayOutStaging(call, at) : at;
}

CPD_HOST_DEVICE inline int64_t LayOutLocal(Call* call) {
  int64_t num_slots = 0;
  for (int p = 0; p < call->num_groups; ++p) {
    call->groups[p].first_slot = num_slots;
    num_slots += call->groups[p].num_slots;
  }
  call->local_bytes = AlignUp(sizeof(State)) + AlignUp(8 * call->num_groups * call->num_ranks) +
                      AlignUp(num_slots * static_cast<int64_t>(sizeof(Slot)));
  call->first_fetched = call->local_bytes;
  if (call->has_network) call->local_bytes += AlignUp(8 * num_slots);
  return call->num_local * call->local_bytes;
}

// A call as seen by a local rank.
struct Rank {
  const Call& call;
  int local;

  CPD_DEVICE int rank() const { return call.first_rank + local; }
  CPD_DEVICE State* state() const {
    return reinterpret_cast<State*>(call.local + local * call.local_bytes);
  }
  CPD_DEVICE uint64_t* sent(int group) const {
    return reinterpret_cast<uint64_t*>(call.local + local * call.local_bytes +
                                       AlignUp(sizeof(State))) +
           group * call.num_ranks;
  }
  CPD_DEVICE Slot* slots(const OperandGroup& group) const {
    return reinterpret_cast<Slot*>(call.local + local * call.local_bytes + AlignUp(sizeof(State)) +
                                   AlignUp(8 * call.num_groups * call.num_ranks)) +
           group.first_slot;
  }
  // For each slot, the start among the staged rows of the rows that combine fetches.
  CPD_DEVICE int64_t* first_fetched(const OperandGroup& group) const {
    return reinterpret_cast<int64_t*>(call.local + local * call.local_bytes + call.first_fetched) +
           group.first_slot;
  }
  // The memory of this rank's own channel.
  CPD_DEVICE char* channel() const { return call.symmetric[rank()]; }
  CPD_DEVICE ErrorRecord* error() const { return call.errors + local; }

  // A field of this rank, with `count` elements per rank.
  CPD_DEVICE IntArray Field(const OperandGroup& group, const IntArray& field, int64_t count) const {
    return group.has_all_views ? field.From(static_cast<int64_t>(rank()) * count) : field;
  }

  // Whether a rank is on this device, and where it is among those: the rows of their arrays are
  // consecutive.
  CPD_DEVICE bool IsHere(int64_t rank) const {
    return rank >= call.first_rank && rank < call.first_rank + call.num_local;
  }
  CPD_DEVICE int64_t IndexHere(int64_t rank) const { return rank - call.first_rank; }

  CPD_DEVICE const char* in(const OperandGroup& group, const Array& array) const {
    const int64_t rows = call.is_dispatch ? group.num_tokens : group.capacity;
    return array.in + local * rows * array.in_row_bytes;
  }
  CPD_DEVICE char* out(const OperandGroup& group, const Array& array) const {
    const int64_t rows = call.is_dispatch ? group.capacity : group.num_tokens;
    return array.out + local * rows * array.out_row_bytes;
  }

  // Where a rank begins among `n` strips: each one behind itself. Ranks whose plans name receivers
  // in order then write to different ranks at the same time.
  CPD_DEVICE int64_t Turned(int64_t strip, int64_t n) const {
    const int64_t turned = strip + n * (rank() + 1) / call.num_ranks;
    return turned < n ? turned : turned - n;
  }
};

// The channel of one rank, as all ranks address it.
CPD_DEVICE uint64_t* Arrived(const Call& call, int at, int from) {
  return reinterpret_cast<uint64_t*>(call.symmetric[at]) + from;
}
CPD_DEVICE char* Half(const Call& call, int at, uint64_t epoch) {
  return call.symmetric[at] + call.half_begin + (epoch & 1) * call.half_bytes;
}
CPD_DEVICE uint64_t* Message(const Call& call, int at, uint64_t epoch, int from) {
  return reinterpret_cast<uint64_t*>(Half(call, at, epoch) + from * MessageBytes(call));
}
CPD_DEVICE uint64_t* Tags(const Call& call, int at, uint64_t epoch, const OperandGroup& group) {
  return reinterpret_cast<uint64_t*>(Half(call, at, epoch) + group.tags);
}

// The staging place of a message that the network will read.
CPD_DEVICE uint64_t* StagedMessage(const Rank& rank, int to) {
  return reinterpret_cast<uint64_t*>(rank.channel() + rank.call.staged_messages +
                                     to * MessageBytes(rank.call));
}

// Stores the first error for the host. Only one thread of a rank calls it at a time.
CPD_DEVICE void RaiseAs(ErrorRecord* record, const ErrorRecord& what, int rank, uint64_t epoch) {
  const uint64_t raised = record->raised;
  if (raised != LoadAcquire(&record->reported)) return;
  record->failure = what.failure;
  record->group = what.group;
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

}  // namespace cpd::kernels
