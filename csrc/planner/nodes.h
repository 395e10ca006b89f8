// Nodes of consecutive ranks: which ranks exchange keys inside a node.
#pragma once

#include "planner/placement.h"

namespace cpd {

// Exchanges the pieces of whole ranks of equal speed, so that fewer keys move between nodes.
void ArrangeInNodes(const PlacementProblem& problem, RankPieces* ranks);

// The problem in which each node is one rank.
PlacementProblem NodesOf(const PlacementProblem& problem);

// The problem of the ranks of one node, for some pieces of all documents.
PlacementProblem RanksOf(const PlacementProblem& problem, int32_t node);

}  // namespace cpd
