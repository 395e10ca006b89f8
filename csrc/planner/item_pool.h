// The unplaced items, ordered by the keys that their last query needs.
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
  ItemPool(const PlacementProblem& problem, const std::vector<Piece>& items)
      : problem_(problem), items_(items), last_(static_cast<int64_t>(items.size())) {
    std::sort(items_.begin(), items_.end(),
              [this](const Piece& a, const Piece& b) { return IsBefore(a, b); });
  }

  // Grows with the work per token. For whole documents it is the number of tokens.
  int64_t Reach(const Piece& item) const {
    return problem_.IsCausal() ? item.end : problem_.lengths[item.document];
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
    const int64_t place =
        std::lower_bound(begin, end, item,
                         [this](const Piece& a, const Piece& b) { return IsBefore(a, b); }) -
        items_.begin();
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
  bool IsBefore(const Piece& a, const Piece& b) const {
    const int64_t x = Reach(a), y = Reach(b);
    if (x != y) return x < y;
    return a.document != b.document ? a.document < b.document : a.end < b.end;
  }

  const PlacementProblem& problem_;
  std::vector<Piece> items_;
  int64_t first_ = 0;
  int64_t last_;
};

}  // namespace cpd
