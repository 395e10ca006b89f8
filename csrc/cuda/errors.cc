// Messages for errors found on a device, with the words of the CPU transports where they apply.
#include "cuda/errors.h"

#include <sstream>

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
    case Failure::kNone:
      text << " found nothing wrong";
      break;
    case Failure::kRank:
      text << " runs as rank " << e.seen
           << ". The program was compiled for other devices than it runs on; compile it again.";
      break;
    case Failure::kBatch:
      if (e.slot == 0 && e.expected == kernels::kNoRank) {
        text << ": the plan is a fallback: its batch does not fit the config, so nothing was "
                "planned. Use another algorithm, such as a ring, where `fits` of the plan is "
                "false. Its `describe` says what the batch needs.";
        break;
      }
      if (e.slot == 0 && e.expected == kernels::kOutOfOrder) {
        text << ": a document has several pieces in its batch row, by the segment ids and "
                "positions of all ranks, but documents must be contiguous. For tokens in placed "
                "order, pass algorithm='placed' with their plan; for tokens in zigzag order, "
                "layout='zigzag'; for tokens in order, omit layout. Different documents need "
                "different ids, or positions that start again. For SharedPrefix and Tree, whose "
                "positions return to those of the prompt or of a parent, omit positions here.";
        break;
      }
      if (e.slot == 0 && e.expected == kernels::kWrongMask) {
        text << ": the mask is not one of these tokens and documents. Make it from whole batch "
                "rows in packed order, and permute it like the tokens. In each document, the "
                "prefix of PrefixLM and the prompt of SharedPrefix come first, and the spans of "
                "Tree in depth-first order.";
        break;
      }
      if (e.slot == 0) {
        text << ": this is the part of rank " << e.expected << ", on rank " << e.seen
             << ". A rank is a position on the mesh axis, not a process. Place on each device the "
                "part of its own rank; see `slice_of` of the plan.";
        break;
      }
      text << ": the plan was made for another batch: the "
           << (e.slot == 1   ? "segment ids"
               : e.slot == 2 ? "positions"
                             : "mask")
           << " of rank " << e.rank << (e.slot == 3 ? " has" : " have") << " checksum " << e.seen
           << " but the plan expects " << e.expected
           << ". Pass the plan of this batch, and placed tokens in placed order.";
      break;
    case Failure::kLength:
      slot() << " has seq_len " << e.seen << " and src_offset " << e.expected
             << "; both must be at least 0. See Metadata.validate().";
      break;
    case Failure::kDstRank:
      target() << " has dst_rank " << e.seen << "; it must be in [-1, " << num_ranks
               << "). See Metadata.validate().";
      break;
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
    case Failure::kCounts:
      text << " expects " << e.expected << " tokens from rank " << e.peer
           << " (num_recv_tokens) but rank " << e.peer << "'s slots send it " << e.seen
           << ". If the plan was made under jit, a static bound (max_recv_seqs, "
              "max_q_transfers, max_kv_transfers, max_pieces) was too small: raise it. "
              "Otherwise, see Metadata.validate().";
      break;
    case Failure::kPlan:
      text << " follows the plan with checksum " << e.expected << " but rank " << e.peer
           << " follows another one, with checksum " << e.seen
           << ". Plan the same batch, with the same config and mask, in every process.";
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
      text << " runs another call than rank " << e.peer
           << ". All ranks must run the same programs in the same order.";
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

}  // namespace cpd
