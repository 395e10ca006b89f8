// What is wrong with a plan, in the words that CPU and GPUs have in common.

#include <sstream>

#include "dispatch/dispatch.h"

namespace cpd {
namespace {

template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

constexpr char kExperts[] = "experts", kByRank[] = "experts by rank:";

}  // namespace

std::string OtherBatch(int64_t part, int64_t expected, int64_t seen, const std::string& rank) {
  constexpr const char* kNames[] = {"rank", "segment ids", "positions", "mask"};
  static_assert(kFingerprintSize == 1 + 2 * std::size(kNames));
  if (part == 0 && expected == kOutOfOrder) {
    return ": a document has several pieces in its batch row, by the segment ids and positions of "
           "all ranks, but documents must be contiguous. For tokens in another order, pass "
           "documents= in it: documents.zigzag(num_ranks), or Placement.documents. Different "
           "documents need different ids, or positions that start again. For SharedPrefix and "
           "Tree, whose positions return to those of the prompt or of a parent, omit positions "
           "here.";
  }
  if (part == 0 && expected == kWrongMask) {
    return ": the mask is not one of these tokens and documents. Make it from whole batch rows in "
           "packed order, and permute it like the tokens. In each document, the prefix of PrefixLM "
           "and the prompt of SharedPrefix come first, and the spans of Tree in depth-first order. "
           "The picks of Selected ascend, and are of keys that its mask shows to their query: pass "
           "those of these tokens, with the block= and order= with which they were made.";
  }
  if (part == 0 && expected <= kWrongTokens) {
    const int64_t array = (kWrongTokens - expected) / 2;
    if ((kWrongTokens - expected) % 2 != 0) {
      return Text(": array ", array,
                  " has other values than its checksums. Pass the "
                  "token_checksums of this batch, and arrays that have not changed since.");
    }
    return Text(": array ", array,
                " has the values of its checksums, but not in the order of the "
                "documents. Pass the documents of this batch, and call their `apply`, or that of "
                "their placement, exactly once on each array.");
  }
  if (part == 0) {
    return Text(": this is the part of rank ", expected, ", on ", rank,
                ". A rank is a position on the mesh axis, not a process. Place on each device the "
                "part of its own rank; see `slice_of` of the plan.");
  }
  return Text(": the plan was made for another batch: the ", kNames[part], " of ", rank,
              part == 3 ? " has" : " have", " checksum ", seen, " but the plan expects ", expected,
              ". Pass the plan of this batch, and placed tokens in placed order.");
}

std::string OtherPlan(int64_t own, int64_t other, const std::string& rank) {
  return Text(" follows the plan with checksum ", own, " but ", rank,
              " follows another one, with checksum ", other,
              ". Plan the same batch, with the same config and mask, in every process.");
}

std::string OtherCounts(int64_t source, int64_t announced, int64_t sent) {
  return Text(" expects ", announced, " tokens from rank ", source, " (num_recv_tokens) but rank ",
              source, "'s slots send it ", sent,
              ". If the plan was made under jit, a static bound (max_recv_seqs, max_q_transfers, "
              "max_kv_transfers, max_pieces) was too small: raise it. Otherwise, see "
              "Metadata.validate().");
}

std::string BadLength(int64_t seq_len, int64_t src_offset) {
  return Text(" has seq_len ", seq_len, " and src_offset ", src_offset,
              "; both must be at least 0. See Metadata.validate().");
}

std::string BadTarget(int64_t dst_rank, int64_t num_ranks) {
  return Text(" has dst_rank ", dst_rank, "; it must be in [-1, ", num_ranks,
              "). See Metadata.validate().");
}

bool AreExperts(const std::string& capacity_name) { return capacity_name.rfind(kExperts, 0) == 0; }

std::string OfRoute(const std::string& op) {
  const size_t axis = op.find(" over axis"), part = op.find(", plan ");
  return "route" + (axis == std::string::npos ? "" : op.substr(axis, part - axis));
}

std::string TooManyRows(int64_t rank, int64_t need, const std::string& capacity_name) {
  return Text("rank ", rank, " needs ", need, " rows for its experts but capacity is ",
              capacity_name.substr(capacity_name.find(':') + 1), ". Pass capacity>=", need,
              ", or overflow='drop'; see fit_capacity.");
}

std::string NoExpert(const std::string& capacity_name, int64_t rank, int64_t slot, int64_t replica,
                     int64_t expert) {
  const std::string choice = capacity_name.rfind(kByRank, 0) == 0
                                 ? " chose expert "
                                 : Text(" token ", slot, " choice ", replica, " is expert ");
  return Text("rank ", rank, choice, expert,
              ", which has no place. Pass an expert_index in [-1, num_experts), and a "
              "physical_to_logical that holds every chosen expert, and only experts or -1.");
}

}  // namespace cpd
