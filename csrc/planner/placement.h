// Places the tokens of packed documents on ranks: equal tokens, nearly equal work, few moved keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "planner/problem.h"

namespace cpd {

struct PlacementProblem : PlannerProblem {
  int64_t tokens_per_rank =
      0;  // all ranks together hold at least the documents; the rest is padding
  int64_t max_received = kNoLimit;  // rows that a rank receives, its own included
  int64_t most_seeds = kNoLimit;    // of constructions that differ by a seed

  std::vector<int64_t> limits;  // work of each rank; see `SetLimits`
  int64_t fastest_speed = 1;

  // Rows that a rank receives for this piece alone, its own included.
  int64_t Rows(const Piece& piece) const {
    const int64_t first = FirstKey(piece.document, piece.start);
    return std::max<int64_t>(0, LastKey(piece.document, piece.end) - first);
  }
  // No query attends to later tokens, for certain.
  bool IsCausal() const { return !table && pairs.IsCausal(); }
  // Positions of a document between which the pairs of a query only grow, stay or fall, if known.
  std::vector<int64_t> Turns(int32_t document) const {
    return table ? std::vector<int64_t>() : pairs.Turns(lengths[document]);
  }
  bool HasCapacity() const { return max_received < kNoLimit; }
  // The time of some work, or of a piece, on this rank: the work, if it is the fastest.
  int64_t TimeOf(int64_t work, int32_t rank) const {
    if (speeds[rank] == fastest_speed) return work;
    return static_cast<int64_t>(static_cast<Wide>(work) * fastest_speed / speeds[rank]);
  }
  int64_t Time(const Piece& piece, int32_t rank) const { return TimeOf(Work(piece), rank); }
};

// The largest work of each rank: its share of all work, plus the tolerance; rounded down.
std::vector<int64_t> WorkLimits(int64_t total, const std::vector<int64_t>& speeds,
                                int64_t tolerance_ppm);

// Sets `limits` and `fastest_speed`, and `speeds` if it is empty.
void SetLimits(PlacementProblem* problem);

// All pieces once, sorted by document and start; adjacent ones are joined.
void SortAndJoin(std::vector<Piece>* pieces);

// The rows that a rank with these pieces receives, its own included. Sorts and joins them.
int64_t ReceivedRows(const PlacementProblem& problem, std::vector<Piece>* pieces);

// The received rows that are not the rank's own. Sorts and joins the pieces.
int64_t ReceivedKeys(const PlacementProblem& problem, std::vector<Piece>* pieces);

// Keys that one rank sends to another.
struct Traffic {
  int32_t source = 0;
  int32_t target = 0;
  int64_t keys = 0;
};
std::vector<Traffic> ListTraffic(const PlacementProblem& problem, const RankPieces& ranks);

// A rank receives this many rows more than it may, most of them of this document.
struct Overflow {
  int32_t document = 0;
  int64_t rows = 0;
};

// The pieces of each rank are sorted and joined.
std::vector<Overflow> ListOverflows(const PlacementProblem& problem, const RankPieces& ranks);

// What each rank sends and receives.
std::vector<LinkRows> ListLinks(const PlacementProblem& problem, const RankPieces& ranks);

// The cost of an assignment, the most important part first. A rank receives a key only once.
struct PlacementCost {
  int64_t overflow = 0;       // rows by which ranks exceed their capacity, over all ranks
  int64_t excess = 0;         // excess of work, or time, of the most loaded rank over its limit
  int64_t between_nodes = 0;  // keys that move to another node
  int64_t received_keys = 0;  // over all ranks

  bool operator<(const PlacementCost& other) const {
    if (overflow != other.overflow) return overflow < other.overflow;
    if (excess != other.excess) return excess < other.excess;
    if (between_nodes != other.between_nodes) return between_nodes < other.between_nodes;
    return received_keys < other.received_keys;
  }
  bool operator==(const PlacementCost& other) const { return !(*this < other) && !(other < *this); }
};
PlacementCost CostOf(const PlacementProblem& problem, const RankPieces& ranks);

// The best of several constructions, after repair. Uses integers only and a fixed number of steps:
// equal problems give equal results on every machine. If the capacity or a limit of work cannot be
// kept, the result exceeds it by as little as was found.
RankPieces PlaceDocuments(PlacementProblem problem);

// ---- The steps of a placement: constructions, repair, and the arrangement of ranks in nodes.

// A number of thousandths of some work.
inline int64_t Scaled(int64_t work, int64_t permille) {
  return static_cast<int64_t>(static_cast<Wide>(work) * permille / 1000);
}

// What a document may cost its ranks where the capacity conflicts with balance.
struct Concession {
  int64_t work_permille = 1000;    // of the work limit, for a rank that closes with a part of it
  int64_t needed_permille = 1000;  // the most that a rank got
};

// The parameters of a construction.
struct Closing {
  int64_t reserve_percent = 0;  // short documents reserved to fill ranks exactly, per 100 ranks
  int64_t dense_percent = 0;    // documents above this part of the limit come first; 0: off
  uint64_t seed = 0;            // varies what a slice must save from rank to rank; 0: does not
};

// The fastest ranks come first. The next rank takes the largest tail of the longest remaining
// document that the work limit allows, beside the shortest documents. So the heads, whose keys must
// be received, are as short as possible. Once the longest remaining document fits a rank whole,
// ranks are filled with whole documents up to the mean of the remaining work. `sorted` are whole
// documents in the order of `ItemPool`.
//
// With `concessions`, one for each document of the problem, a rank for which no part of the longest
// document keeps its limits gets as little more work as possible; `needed_permille` becomes that.
RankPieces CloseRanks(const PlacementProblem& problem, const std::vector<Piece>& items,
                      const Closing& closing, std::vector<Concession>* concessions = nullptr);

// Ranks with documents that break a limit get more work, as little as was found to be enough; all
// others keep their share.
RankPieces ConcedeWork(const PlacementProblem& problem, const std::vector<Piece>& items);

// The best of `best` and of several placements in which ranks take equally long.
RankPieces PlaceByTime(const PlacementProblem& problem, std::vector<Piece> items, RankPieces best);

// Exchanges equal numbers of tokens between a rank above the limit and one below it, with as few
// cuts as possible, until all ranks keep the limit or nothing helps. Takes a bounded number of
// steps.
void RepairBalance(const PlacementProblem& problem, RankPieces* ranks, bool may_shift = true);

// Exchanges the pieces of whole ranks of equal speed, so that fewer keys move between nodes.
void ArrangeInNodes(const PlacementProblem& problem, RankPieces* ranks);

}  // namespace cpd
