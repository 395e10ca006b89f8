// The common part of the registries of buffers: errors about buffers in use.
#include "transport/buffer_registry.h"

namespace cpd {
namespace {

std::string Calls(int64_t count) {
  return std::to_string(count) + (count == 1 ? " call" : " calls");
}

}  // namespace

Status BufferIsInUse(const std::string& op, int64_t id, int64_t num_calls, bool counts_ranks) {
  return Status::Invalid(op, ": buffer ", id, " is in use by ", Calls(num_calls),
                         (counts_ranks ? " in flight, one per rank. Wait for their results"
                                       : " in flight. Wait for their results"),
                         ", for example with jax.block_until_ready, then destroy it.");
}

Status BuffersAreInUse(const std::string& op, const std::map<int64_t, int64_t>& num_calls,
                       bool counts_ranks) {
  std::string busy;
  for (const auto& [id, count] : num_calls) {
    if (!busy.empty()) busy += ", ";
    busy += std::to_string(id) + " (" + Calls(count) + ")";
  }
  return Status::Invalid(op,
                         (counts_ranks ? ": calls in flight, counted per rank, use buffers "
                                       : ": calls in flight use buffers "),
                         busy,
                         "; none has been destroyed. Wait for their results, for example with "
                         "jax.block_until_ready, then destroy all.");
}

}  // namespace cpd
