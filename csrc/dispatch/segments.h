// Turns the metadata of all ranks into checked segments; rejects invalid metadata before any copy.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "dispatch/dispatch.h"

namespace cpd {

// One operand group, as each rank contributes it.
using Ranks = std::vector<const OperandGroup*>;

// One replica of one shard, with everything that planning needs to know about it.
struct Segment {
  int32_t src_rank;
  int32_t dst_rank;
  int64_t src_row;
  int64_t dst_row;
  int64_t num_rows;
  int64_t replica;  // its index in [S, C]
};

// Checks that all ranks follow the plan of one batch, and that it is the batch each of them sees.
Status CheckFingerprints(const std::string& op, const Ranks& ranks,
                         const std::vector<int>* processes);

// Whether the plan was not made: its batch does not fit.
bool IsFallback(const Ranks& ranks);

// The largest announced need that exceeds a rank's receive buffers, in words; empty if all fit.
// `capacity_name` is the argument that sets their size.
std::string DescribeOverflow(const Ranks& ranks, const std::string& capacity_name);

// Reads the segments of one group and sorts those of each destination by row. Rejects inconsistent
// arrays, ranges outside of them, rows written twice and wrong counts.
Status ReadAndCheck(const std::string& op, const Ranks& ranks, const std::string& capacity_name,
                    std::vector<Segment>* segments, std::vector<std::vector<Segment>>* received);

// Checks that every array has a type that can be summed.
Status CheckTypes(const std::string& op, const Ranks& ranks);

}  // namespace cpd
