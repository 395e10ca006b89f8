// Messages for errors found on a device, with the words of the CPU transports where they apply.
#include "cuda/errors.h"

#include <sstream>

#include "dispatch/dispatch.h"

namespace cpd {

using kernels::ErrorRecord;
using kernels::Failure;

std::string Describe(const std::string& op, const ErrorRecord& e, int num_ranks, int num_groups) {
  std::ostringstream text;
  text << op;
  if (num_groups > 1) text << ", plan " << e.group << " of 0.." << num_groups - 1;
  text << ": rank " << e.rank;
  const auto slot = [&]() -> std::ostream& { return text << " slot " << e.slot; };
  const auto target = [&]() -> std::ostream& { return slot() << " replica " << e.replica; };
  switch (e.failure) {
    case Failure::kNone: text << " found nothing wrong"; break;
    case Failure::kRank:
      text << " runs as rank " << e.seen
           << ". The program was compiled for other devices than it runs on; compile it again.";
      break;
    case Failure::kBatch:
      text << (e.slot == 0 && e.expected == kernels::kNoRank
                   ? kIsFallback
                   : OtherBatch(e.slot, e.expected, e.seen, "rank " + std::to_string(e.rank)));
      break;
    case Failure::kLength: slot() << BadLength(e.seen, e.expected); break;
    case Failure::kDstRank: target() << BadTarget(e.seen, num_ranks); break;
    case Failure::kTokens:
      slot() << " names " << e.seen << " rows from row " << e.expected
             << " but the rank has fewer tokens. Pass an array with at least that many rows.";
      break;
    case Failure::kDstOffset:
      target() << " has dst_offset " << e.seen
               << "; it must be in [0, 2^40]. See Metadata.validate().";
      break;
    case Failure::kCapacity:
      text << " found that rank " << e.peer << " would receive " << e.seen
           << " tokens, more than its capacity. Pass capacity>=" << e.seen
           << ", or a plan that sends less to one rank.";
      break;
    case Failure::kFetched:
      text << " has to fetch " << e.seen << " rows over the network, but has space for "
           << e.expected
           << ". Ranges of its plan overlap at their destinations; see Metadata.validate(). For "
              "such a plan pass implementation='xla'.";
      break;
    case Failure::kCounts: text << OtherCounts(e.peer, e.expected, e.seen); break;
    case Failure::kPlan:
      text << OtherPlan(e.expected, e.seen, "rank " + std::to_string(e.peer));
      break;
    case Failure::kOverlap:
      text << " was sent " << e.expected << " rows, which wrote " << e.seen
           << " rows of its result. Destination ranges must not overlap; see Metadata.validate().";
      break;
    case Failure::kPeer:
      text << " has no result: the plan of rank " << e.peer
           << " was rejected; its error names the cause.";
      break;
    case Failure::kGone:
      text << " has no result: rank " << e.peer
           << " gave up on this buffer in an earlier call; its error names the cause. Create "
              "another buffer, or restart the program.";
      break;
    case Failure::kProgram:
      text << " runs another call than rank " << e.peer << ": expected call "
           << kernels::SiteOf(e.expected) << " of its program, seen call "
           << kernels::SiteOf(e.seen)
           << (e.expected >> kernels::kSiteBits == e.seen >> kernels::kSiteBits
                   ? ", of the same shapes"
                   : ", which differs in more than its number")
           << ". All ranks must run the same programs, whose calls XLA has put in the same order: "
              "compile them with the same flags, autotuning results and profiles.";
      break;
    case Failure::kDeadline:
      text << " waited for rank " << e.peer << " until the deadline: signal expected " << e.expected
           << ", seen " << e.seen
           << ". That rank did not run this call, or is slower than the deadline; pass a longer "
              "one. Create another buffer, or restart the program.";
      break;
    case Failure::kBroken:
      text << " cannot use this buffer any more: an earlier call on it failed halfway. Create "
              "another buffer, or restart the program.";
      break;
  }
  text << " (call " << e.epoch << " on this buffer)";
  return text.str();
}

std::vector<int> MissingRanks(const uint64_t* arrived, int num_ranks, uint64_t call) {
  std::vector<int> missing;
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (arrived[rank] < call) missing.push_back(rank);  // one that has given up is above all
  }
  return missing;
}

}  // namespace cpd
