// What is wrong with a plan, in the words that CPU and GPUs have in common. Each continues a
// message that begins with the operation and, but for the first two, a rank.
#pragma once

#include <cstdint>
#include <string>

namespace cpd {

constexpr char kIsFallback[] =
    ": the plan is a fallback: its batch does not fit the config, so nothing was planned. Use "
    "another algorithm, such as a ring, where `fits` of the plan is false. Its `describe` says "
    "what the batch needs.";

// `part` of the fingerprint: 0 rank, 1 segment ids, 2 positions, 3 mask.
std::string OtherBatch(int64_t part, int64_t expected, int64_t seen, const std::string& rank);

std::string OtherPlan(int64_t own, int64_t other, const std::string& rank);
std::string OtherCounts(int64_t source, int64_t announced, int64_t sent);
std::string BadLength(int64_t seq_len, int64_t src_offset);
std::string BadTarget(int64_t dst_rank, int64_t num_ranks);

// A layer of experts has the capacity name "experts:" and the rows of a rank, or "experts by rank:"
// if a slot is not a token but all tokens for a rank. Its errors are those of `route`, whichever
// exchange finds them: slots are tokens, replicas are choices, and a rank beyond the last one, by
// n, is expert n, which has no place; a negative rank is the index itself.
bool AreExperts(const std::string& capacity_name);
std::string OfRoute(const std::string& op);  // the operation in its messages
std::string TooManyRows(int64_t rank, int64_t need, const std::string& capacity_name);
std::string NoExpert(const std::string& capacity_name, int64_t rank, int64_t slot, int64_t replica,
                     int64_t expert);

}  // namespace cpd
