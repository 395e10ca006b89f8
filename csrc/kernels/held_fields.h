// The small operands of an exchange, copied at its start: it reads the copies while the program
// goes on.
#pragma once

#include <cstdint>

#include "kernels/block.h"
#include "kernels/call.h"

namespace cpd::kernels {

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
