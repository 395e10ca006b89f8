// Where a custom call is in its program: there its ranks meet.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ffi/attributes.h"
#include "transport/transport.h"

namespace cpd {

// The rank that runs a call.
struct CallingRank {
  int64_t run_id;  // the same on all ranks of one execution
  int rank;        // its place on the axis
  int64_t group;   // its place on the other axes of the mesh
};

// Part of the state that XLA keeps per custom call of a program. An id chosen at lowering would not
// be unique: lowerings are cached, so two calls can share one.
class CallSite {
 public:
  // Reads its attributes. Each call of this is a new site.
  void Read(AttributeReader* attributes, int64_t num_ranks);

  // Sets the key and the processes of the ranks in `exchange`, whose `num_ranks` is known, and the
  // transport that the program names.
  Status Describe(const CallingRank& calling, Exchange* exchange, Transport** transport) const;

 private:
  // Unique in this process. For a program that spans processes: unique in the program and equal in
  // all processes, from the signature and the number among equal signatures.
  int64_t uid_ = 0;
  std::string transport_;                    // name of an implementation: Python has chosen it
  std::string signature_;                    // operation, shapes and attributes
  std::vector<std::vector<int>> processes_;  // by group, then rank; empty: all ranks are here
};

// No program is being compiled any more: later call sites belong to another program.
void EndPrograms();

}  // namespace cpd
