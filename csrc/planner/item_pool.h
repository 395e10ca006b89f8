// The unplaced items: one piece of each document, ordered by its end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "planner/placement.h"

namespace cpd {

// A sorted array with room at both ends: most items are taken from the front, and cut pieces return
// near the back.
class ItemPool {
 public:
  // `sorted` must be ordered by `Before`.
  explicit ItemPool(const std::vector<Piece>& sorted)
      : items_(sorted), last_(static_cast<int64_t>(sorted.size())) {}

  static bool Before(const Piece& a, const Piece& b) {
    return a.end != b.end ? a.end < b.end : a.document < b.document;
  }

  int64_t size() const { return last_ - first_; }
  const Piece& operator[](int64_t i) const { return items_[first_ + i]; }
  const Piece& back() const { return items_[last_ - 1]; }

  Piece Take(int64_t i) {
    const Piece taken = items_[first_ + i];
    const auto place = items_.begin() + first_ + i;
    if (i < size() / 2) {
      std::move_backward(items_.begin() + first_, place, place + 1);
      ++first_;
    } else {
      std::move(place + 1, items_.begin() + last_, place);
      --last_;
    }
    return taken;
  }

  void Insert(const Piece& item) {
    const auto begin = items_.begin() + first_, end = items_.begin() + last_;
    const int64_t place = std::lower_bound(begin, end, item, Before) - items_.begin();
    if (first_ > 0 && place - first_ < last_ - place) {
      std::move(items_.begin() + first_, items_.begin() + place, items_.begin() + first_ - 1);
      --first_;
      items_[place - 1] = item;
      return;
    }
    if (last_ == static_cast<int64_t>(items_.size())) items_.push_back({});
    std::move_backward(items_.begin() + place, items_.begin() + last_, items_.begin() + last_ + 1);
    ++last_;
    items_[place] = item;
  }

 private:
  std::vector<Piece> items_;
  int64_t first_ = 0;
  int64_t last_;
};

}  // namespace cpd
