// What the host prepares for a call: strips of its rows, and copies of its small operands.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "kernels/block.h"
#include "kernels/call.h"
#include "kernels/copy.h"

namespace cpd::kernels {

// ---- How many blocks move the rows of a call, and into which strips the host cuts these for them.

// Multiprocessors of an exchange between devices, if no number is asked for. On one H200, so many
// push rows at 0.8 TB/s and take them at 1.0 TB/s, more than NVLink carries. A GEMM beside them
// takes 4 to 11 % longer; beside an exchange on all of them, 12 to 16 %.
constexpr int kSmsBetweenDevices = 64;

// Blocks of an exchange: one on each of `num_comm_sm` multiprocessors, or the `num_resident` that
// fill the device, if it holds all ranks or all are asked for.
inline int NumMoveBlocks(int64_t num_comm_sm, int num_resident, bool on_one_device) {
  if (num_comm_sm <= 0 && !on_one_device) num_comm_sm = kSmsBetweenDevices;
  const bool are_all = num_comm_sm <= 0 || num_comm_sm >= num_resident / kMoveBlocks;
  return are_all ? num_resident : static_cast<int>(num_comm_sm);
}

// Strips of about 100 kB, and several per block if there is enough data; `num_blocks` are those of
// all local ranks. Each array's share is a whole number of a block's steps if a strip can hold so
// many rows.
inline int64_t RowsPerStrip(const Call& call, const OperandGroup& group, int num_blocks) {
  int64_t row_bytes = 0, in_steps = 1;
  for (int a = group.first_array; a < group.first_array + group.num_arrays; ++a) {
    const int64_t bytes = call.arrays[a].in_row_bytes;
    row_bytes += bytes;
    in_steps = std::lcm(in_steps, kStepBytes / std::gcd(kStepBytes, bytes));
  }
  const int64_t rows = std::max(group.num_tokens, group.capacity);
  const int64_t blocks_of_rank = std::max(1, num_blocks / call.num_local);
  const int64_t bytes =
      std::clamp<int64_t>(rows * row_bytes / (4 * blocks_of_rank), 32 << 10, 128 << 10);
  const int64_t wanted = std::max<int64_t>(1, bytes / std::max<int64_t>(1, row_bytes));
  return wanted < in_steps ? wanted : wanted - wanted % in_steps;
}

// ---- The small operands of an exchange, copied at its start: it reads the copies while the
// program goes on.

constexpr int kMaxFields = 1 + 6 * kMaxOperandGroups;  // the rank, and the metadata of each group

// Arrays of 32 or 64-bit integers, copied by a block each.
struct HeldFields {
  int num = 0;
  const char* from[kMaxFields];
  char* to[kMaxFields];
  int64_t bytes[kMaxFields];
};

// Bytes of a field in the memory that holds the copies.
CPD_HOST_DEVICE inline int64_t HeldBytes(int64_t bytes) { return (bytes + 15) & ~int64_t{15}; }

CPD_DEVICE void Hold(const Block& block, const HeldFields& fields) {
  const auto* from = reinterpret_cast<const uint32_t*>(fields.from[block.index]);
  auto* to = reinterpret_cast<uint32_t*>(fields.to[block.index]);
  for (int64_t i = block.thread; 4 * i < fields.bytes[block.index]; i += block.num_threads) {
    to[i] = from[i];
  }
}

// Makes a call read copies in `memory` in place of its fields; returns the bytes of all copies.
inline int64_t HoldFields(Call* call, char* memory, HeldFields* fields) {
  int64_t at = 0;
  fields->num = 0;
  const auto hold = [&](const void* from, int64_t bytes) -> const void* {
    char* to = memory + at;
    at += HeldBytes(bytes);
    const int i = fields->num++;
    fields->from[i] = static_cast<const char*>(from);
    fields->to[i] = to;
    fields->bytes[i] = bytes;
    return to;
  };
  const auto hold_ints = [&](IntArray* field, int64_t count) {
    if (!*field) return;
    const bool is_narrow = field->type == IntType::kI32 || field->type == IntType::kU32;
    field->data = hold(field->data, count * (is_narrow ? 4 : 8));
  };
  if (call->rank_operand != nullptr) {
    call->rank_operand = static_cast<const int32_t*>(hold(call->rank_operand, 4));
  }
  for (int p = 0; p < call->num_groups; ++p) {
    OperandGroup& group = call->groups[p];
    const int64_t num_views = group.has_all_views ? call->num_ranks : 1;
    const int64_t num_targets = num_views * group.num_slots * group.num_replicas;
    hold_ints(&group.num_recv_tokens, num_views * (call->num_ranks + 1));
    hold_ints(&group.seq_len, num_views * group.num_slots);
    hold_ints(&group.dst_rank, num_targets);
    hold_ints(&group.dst_offset, num_targets);
    hold_ints(&group.src_offset, num_views * group.num_slots);
    hold_ints(&group.fingerprint, kFingerprintSize);
  }
  return at;
}

}  // namespace cpd::kernels
