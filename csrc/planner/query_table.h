// What each query sees under a mask that data decides, as running counts over packed documents.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace cpd {

// Numbers of the queries of all documents, one document after another. Keys count from the start of
// the document.
struct QueryTable {
  std::vector<int64_t> first_query;   // of each document, in the lists below
  std::vector<int64_t> pairs_before;  // of all queries before each, and of all
  std::vector<int64_t> first_key;     // that the query sees, or a later one of its document
  std::vector<int64_t> last_key;      // one past the last that it sees, or an earlier one

  // Pairs of the queries [start, end) of a document.
  int64_t Pairs(int32_t document, int64_t start, int64_t end) const {
    const int64_t first = first_query[document];
    return pairs_before[first + end] - pairs_before[first + start];
  }

  // The keys [FirstKey, LastKey) contain all that these queries see; none if FirstKey is larger.
  int64_t FirstKey(int32_t document, int64_t start) const {
    return first_key[first_query[document] + start];
  }
  int64_t LastKey(int32_t document, int64_t end) const {
    return end == 0 ? 0 : last_key[first_query[document] + end - 1];
  }
};

// A problem is copied often, its table never; null: a mask of numbers, see `PairCount`.
using SharedTable = std::shared_ptr<const QueryTable>;

}  // namespace cpd
