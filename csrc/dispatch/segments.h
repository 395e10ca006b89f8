// From the metadata of all ranks to checked segments: everything that is refused before a copy.
#pragma once

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "dispatch/dispatch.h"

namespace cpd {

// What each rank brings of one part.
using Ranks = std::vector<const DispatchPart*>;

// One replica of one shard, with everything that the rest needs of it.
struct Segment {
  int32_t src_rank;
  int32_t dst_rank;
  int64_t src_row;
  int64_t dst_row;
  int64_t num_rows;
};

template <typename... Parts>
Status Invalid(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  return Status::Invalid(message.str());
}

// All ranks follow the plan of one batch, and it is the batch that each of them sees.
Status CheckStamps(const std::string& op, const Ranks& ranks, const std::vector<int>* processes);

// The largest need of a rank that its receive buffers, sized by `capacity_name`, are too small for,
// by the counts that the ranks announce; in words, or nothing.
std::string DescribeOverflow(const Ranks& ranks, const std::string& capacity_name);

// Reads the segments of one part and sorts those of each destination by row, or refuses them:
// arrays that do not fit each other, ranges outside of them, rows written twice, wrong counts.
Status ReadAndCheck(const std::string& op, const Ranks& ranks, const std::string& capacity_name,
                    std::vector<Segment>* segments, std::vector<std::vector<Segment>>* received);

// Every array has a type that can be summed.
Status CheckTypes(const std::string& op, const Ranks& ranks);

}  // namespace cpd
