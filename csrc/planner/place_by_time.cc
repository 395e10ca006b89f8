// A construction of placements whose ranks take equally long, with what they send and receive.

#include <algorithm>
#include <cstdint>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "planner/placement.h"

namespace cpd {
namespace {

constexpr int64_t kRounds = 5;        // that bring the heads of a document in line with its tails
constexpr int64_t kShareStep = 10;    // thousandths of the time that is left
constexpr int64_t kWhole = 500;       // thousandths of a rank's time: documents below it stay whole
constexpr int64_t kGroups = 16;       // of ranks; those of one get a whole document each
constexpr int64_t kTargets = 6;       // steps of the search for the time of the slowest rank
constexpr int64_t kLearning = 750;    // thousandths of a difference in time that are corrected
constexpr int64_t kLearned = 5;       // placements that learn from the one before, and of
constexpr int64_t kLearnedOfFew = 8;  // so many ranks:
constexpr int64_t kRanksOfFew = 128;
constexpr int64_t kBalances = 3;     // repairs of the best placement
constexpr int64_t kNearMean = 1010;  // thousandths of the mean time that ranks may take

// ---- The time of a rank, and the rows that move.

int64_t Busiest(const LinkTimes& times) { return std::max(times[0], times[1]); }

// Of a rank that computes for `work`, its time, and exchanges keys beside it.
int64_t StepTime(const PlacementProblem& problem, int64_t work, const LinkTimes& exchange) {
  return work + problem.Waits(work, exchange);
}

// Of each rank.
std::vector<int64_t> StepTimes(const PlacementProblem& problem, const RankPieces& ranks) {
  const std::vector<LinkRows> links = ListLinks(problem, ranks);
  std::vector<int64_t> times;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const int64_t work = problem.TimeOf(problem.WorkOf(ranks[r]), static_cast<int32_t>(r));
    times.push_back(StepTime(problem, work, links[r].Times(problem.key_time)));
  }
  return times;
}

// The rows of a document that ranks need, each as often as ranks need it.
class SumOfNeeds {
 public:
  explicit SumOfNeeds(const std::vector<Piece>& needs) {
    for (const Piece& need : needs) {
      starts_.at.push_back(need.start);
      ends_.at.push_back(need.end);
    }
    for (Edges* edges : {&starts_, &ends_}) {
      std::sort(edges->at.begin(), edges->at.end());
      for (int64_t at : edges->at) edges->sum.push_back(edges->sum.back() + at);
    }
  }

  int64_t Rows(const Piece& piece) const { return Before(piece.end) - Before(piece.start); }

 private:
  struct Edges {
    std::vector<int64_t> at, sum{0};  // sorted, and the sum of those before each

    // The sum of min(x, edge).
    int64_t Clipped(int64_t x) const {
      const int64_t num = std::lower_bound(at.begin(), at.end(), x) - at.begin();
      return sum[num] + x * (static_cast<int64_t>(at.size()) - num);
    }
  };

  int64_t Before(int64_t x) const { return ends_.Clipped(x) - starts_.Clipped(x); }

  Edges starts_, ends_;
};

// ---- One document, cut over ranks: tails from its end, and heads, which are sent to all of them.

// What a rank has, and may have with the document.
struct Budget {
  int32_t rank = 0;
  int64_t work = 0;  // its time, with that of the tokens that will fill it
  LinkRows links;
  int64_t time = 0;     // at most, with exchanges
  int64_t tokens = 0;   // at most, of the document
  int64_t filling = 0;  // work of a token that it replaces
};

using Parts = std::vector<std::vector<Piece>>;  // of each budget

class DocumentCut {
 public:
  DocumentCut(const PlacementProblem& problem, int32_t document)
      : problem_(problem),
        document_(document),
        length_(problem.lengths[document]),
        reach_(length_ - 1 - problem.FirstKey(document, length_ - 1)) {}

  // Nothing, if the budgets do not suffice.
  Parts Cut(const std::vector<Budget>& budgets) const {
    const size_t num = budgets.size();
    std::vector<int64_t> row_time = RowTimes(budgets), head(num), rows(num);
    int64_t holders = 0;
    for (int64_t round = 0; round < kRounds; ++round) {
      Parts parts(num);
      std::vector<int64_t> spare(num);
      const int64_t last = std::max<int64_t>(0, holders - 1);
      int64_t end = length_, at = 0;
      holders = 0;
      for (size_t i = 0; i < num && end > 0; ++i) {
        const int32_t rank = budgets[i].rank;
        const int64_t work = budgets[i].work - budgets[i].filling * head[i] +
                             problem_.Time({at, at + head[i], document_}, rank);
        const int64_t held = Busiest(budgets[i].links.Times(problem_.key_time));
        at += head[i];
        const auto rows_of = [&](int64_t start) {
          const int64_t received = start - problem_.FirstKey(document_, start) - head[i];
          return std::max(received, Sent(end - start, holders) + head[i] * last);
        };
        const int64_t least = std::max<int64_t>(0, end - budgets[i].tokens);
        const int64_t start = FirstThat(least, end, [&](int64_t start) {
          const int64_t exchange = held + row_time[i] * rows_of(start);
          const int64_t more = problem_.Time({start, end, document_}, rank);
          return StepTime(problem_, work + more - budgets[i].filling * (end - start),
                          {exchange, 0}) <= budgets[i].time;
        });
        rows[i] = rows_of(start);
        if (start == end) continue;
        spare[i] = std::max<int64_t>(1, start - Sent(end - start, holders));
        parts[i].push_back({start, end, document_});
        end = start;
        ++holders;
      }
      if (end > 0 && (holders == 0 || IsLimited())) return {};
      ShareHeads(end, holders, &spare);
      head = std::move(spare);
      at = 0;
      for (size_t i = 0; i < num; ++i) {
        if (head[i] > 0) parts[i].insert(parts[i].begin(), {at, at + head[i], document_});
        at += head[i];
      }
      const std::vector<LinkRows> links = LinksOf(budgets, parts);
      if (Fits(budgets, parts, links)) return parts;
      for (size_t i = 0; i < num; ++i) {
        if (rows[i] == 0 || parts[i].empty()) continue;
        row_time[i] = (row_time[i] + Busiest(links[i].Times(problem_.key_time)) / rows[i]) / 2;
      }
    }
    return {};
  }

  // What the ranks send and receive. The keys that a rank needs are one range.
  std::vector<LinkRows> LinksOf(const std::vector<Budget>& budgets, const Parts& parts) const {
    std::vector<Piece> needs(parts.size());
    std::map<int32_t, std::vector<size_t>> nodes;
    for (size_t i = 0; i < parts.size(); ++i) {
      if (parts[i].empty()) continue;
      needs[i] = {problem_.FirstKey(document_, parts[i].front().start),
                  problem_.LastKey(document_, parts[i].back().end), document_};
      nodes[problem_.NodeOf(budgets[i].rank)].push_back(i);
    }
    const SumOfNeeds all(needs);
    std::vector<LinkRows> links(parts.size());
    const bool is_between = nodes.size() > 1;
    for (const auto& [node, members] : nodes) {
      for (size_t from : members) {
        int64_t sent = 0, held = 0;
        for (const Piece& piece : parts[from]) sent += all.Rows(piece), held += piece.num_tokens();
        links[from].sent[is_between] += sent - held;
        links[from].received[is_between] += needs[from].num_tokens() - held;
        if (!is_between) continue;
        for (size_t to : members) {
          if (to == from) continue;
          int64_t rows = 0;
          for (const Piece& piece : parts[from]) {
            rows += std::max<int64_t>(
                0, std::min(piece.end, needs[to].end) - std::max(piece.start, needs[to].start));
          }
          links[from].sent[0] += rows, links[from].sent[1] -= rows;
          links[to].received[0] += rows, links[to].received[1] -= rows;
        }
      }
    }
    return links;
  }

 private:
  // Of each rank: of a row that moves, if the same number of them goes to all ranks.
  std::vector<int64_t> RowTimes(const std::vector<Budget>& budgets) const {
    const auto num = static_cast<int64_t>(budgets.size());
    std::map<int32_t, int64_t> inside;
    for (const Budget& budget : budgets) ++inside[problem_.NodeOf(budget.rank)];
    std::vector<int64_t> times;
    for (const Budget& budget : budgets) {
      const int64_t near = inside[problem_.NodeOf(budget.rank)];
      times.push_back(std::max(problem_.key_time.inside * near / num,
                               problem_.key_time.between * (num - near) / num));
    }
    return times;
  }

  // Rows of a tail that go to the ranks with later ones.
  int64_t Sent(int64_t tokens, int64_t holders) const {
    const int64_t all = tokens * holders;
    return IsLimited() ? std::min(all, reach_) : all;
  }
  // Not all queries see the first key.
  bool IsLimited() const { return reach_ + 1 < length_; }

  // Gives the first `end` tokens to ranks in proportion to the rows that they can still send.
  static void ShareHeads(int64_t end, int64_t holders, std::vector<int64_t>* spare) {
    const int64_t needed = end * std::max<int64_t>(1, holders - 1);
    int64_t sum = std::accumulate(spare->begin(), spare->end(), int64_t{0});
    const int64_t more = sum < needed ? (needed - sum) / std::max<int64_t>(1, holders) : 0;
    for (int64_t& x : *spare) x += x > 0 ? more : 0;
    sum = std::max<int64_t>(1, std::accumulate(spare->begin(), spare->end(), int64_t{0}));
    int64_t before = 0, given = 0;
    for (int64_t& x : *spare) {
      before += x;
      const auto until = static_cast<int64_t>(static_cast<Wide>(end) * before / sum);
      x = until - given;
      given = until;
    }
  }

  bool Fits(const std::vector<Budget>& budgets, const Parts& parts,
            const std::vector<LinkRows>& links) const {
    for (size_t i = 0; i < parts.size(); ++i) {
      if (parts[i].empty()) continue;
      int64_t work = budgets[i].work, held = 0;
      for (const Piece& piece : parts[i]) {
        work += problem_.Time(piece, budgets[i].rank), held += piece.num_tokens();
      }
      work -= held * budgets[i].filling;
      LinkRows all = budgets[i].links;
      all.Add(links[i]);
      const int64_t time = StepTime(problem_, work, all.Times(problem_.key_time));
      if (time > budgets[i].time + budgets[i].time / 50 || held > budgets[i].tokens) return false;
    }
    return true;
  }

  const PlacementProblem& problem_;
  const int32_t document_;
  const int64_t length_, reach_;
};

// ---- All documents: long ones cut, others whole, and gaps filled.

// Of each document, if it is cut: work by which a token that fills its ranks exceeds expectation.
using Fillings = std::vector<int64_t>;

bool IsWhole(const PlacementProblem& problem, const Piece& item, int64_t target) {
  return problem.Work(item) <= Scaled(target, kWhole) &&
         item.num_tokens() <= problem.tokens_per_rank * 9 / 10;
}

class Placer {
 public:
  Placer(const PlacementProblem& problem, const Fillings& fillings, int64_t target)
      : problem_(problem),
        fillings_(fillings),
        target_(target),
        size_(problem.HasNodes() ? problem.ranks_per_node : problem.num_ranks),
        ranks_(problem.num_ranks),
        room_(problem.num_ranks, problem.tokens_per_rank),
        time_(problem.num_ranks),
        load_(problem.num_ranks),
        filling_(problem.num_ranks),
        left_(problem.num_ranks / size_, target * size_),
        links_(problem.num_ranks) {}

  // Cuts long documents. Returns whether all of them fit the target.
  bool CutLong(const std::vector<Piece>& by_length) {
    std::vector<Piece> to_cut;
    for (const Piece& item : by_length) {
      (IsWhole(problem_, item, target_) ? whole_ : to_cut).push_back(item);
    }
    Wide work = 0;
    int64_t tokens = 0;
    for (const Piece& item : whole_) work += problem_.Work(item), tokens += item.num_tokens();
    mean_filling_ = static_cast<int64_t>(work / std::max<int64_t>(1, tokens));
    int64_t fillers = problem_.num_ranks * problem_.tokens_per_rank - tokens;
    for (const Piece& item : to_cut) fillers -= item.num_tokens();
    fillers_.push_back(fillers);
    for (auto item = whole_.rbegin(); item != whole_.rend(); ++item) {
      fillers_.push_back(fillers += item->num_tokens());
    }
    for (const Piece& item : to_cut) {
      cut_.push_back(item.document);
      if (!CutInNode(item) && !CutOverNodes(item)) {
        is_fit_ = false;
        gaps_.push_back(item);
      }
    }
    return is_fit_;
  }

  // The mean time of ranks, with the exchange of what is placed, once they are filled.
  int64_t MeanTime() const {
    Wide sum = 0;
    for (const Piece& item : whole_) sum += problem_.Work(item);
    for (int32_t r = 0; r < problem_.num_ranks; ++r) {
      const int64_t filled = time_[r] + filling_[r];
      sum += StepTime(problem_, filled, links_[r].Times(problem_.key_time)) - filling_[r];
    }
    return static_cast<int64_t>(sum / problem_.num_ranks);
  }

  RankPieces Fill() {
    Wide rest = 0;
    int64_t rooms = std::accumulate(room_.begin(), room_.end(), int64_t{0});
    for (const Piece& item : whole_) rest += problem_.Work(item);
    // Ranks that get one document each, in this order. Later documents are not longer: all fit.
    std::vector<int32_t> next;
    size_t num_given = 0;
    for (const Piece& item : whole_) {
      if (num_given == next.size()) {
        next = NeediestRanks(rest * 1024 / std::max<int64_t>(1, rooms), item.num_tokens());
        num_given = 0;
      }
      rest -= problem_.Work(item);
      if (next.empty()) {
        gaps_.push_back(item);
        continue;
      }
      Give(item, next[num_given++]);
      rooms -= item.num_tokens();
    }
    for (const Piece& item : gaps_) FillGaps(item);
    for (std::vector<Piece>& pieces : ranks_) SortAndJoin(&pieces);
    return ranks_;
  }

  // Ranks of cut documents that took longer than the target get more room for what fills them,
  // others less.
  void Learn(Fillings* fillings) const {
    const std::vector<int64_t> of_ranks = StepTimes(problem_, ranks_);
    std::vector<int64_t> times(problem_.lengths.size());
    for (int32_t r = 0; r < problem_.num_ranks; ++r) {
      for (const Piece& piece : ranks_[r]) {
        times[piece.document] = std::max(times[piece.document], of_ranks[r]);
      }
    }
    for (int32_t document : cut_) {
      const int64_t late = times[document] - target_;
      int64_t& filling = (*fillings)[document];
      filling += Scaled(late, kLearning) / problem_.tokens_per_rank;
    }
  }

 private:
  int64_t Left(int32_t rank) const { return std::max<int64_t>(0, target_ - load_[rank]); }

  // Ranks with parts of longer documents, which move more keys, are to be filled with padding and
  // the shortest others; of one document, those with its last tails first. Returns the work of a
  // token after so many of these.
  int64_t FillingAfter(int64_t tokens) const {
    const auto found = std::upper_bound(fillers_.begin(), fillers_.end(), tokens);
    if (found == fillers_.begin()) return 0;
    if (found == fillers_.end()) return mean_filling_;
    const Piece& item = whole_[fillers_.end() - found - 1];
    return std::min(problem_.Work(item) / item.num_tokens(), mean_filling_);
  }

  // After a change of its time or links.
  void Count(int32_t rank) {
    left_[rank / size_] -= Left(rank);
    load_[rank] = StepTime(problem_, time_[rank], links_[rank].Times(problem_.key_time));
    left_[rank / size_] += Left(rank);
  }

  void Give(const Piece& piece, int32_t rank) {
    if (ranks_[rank].empty()) reserved_ += room_[rank];
    reserved_ -= piece.num_tokens();
    ranks_[rank].push_back(piece);
    room_[rank] -= piece.num_tokens();
    time_[rank] += problem_.Time(piece, rank);
    Count(rank);
  }

  void Give(const DocumentCut& cut, const std::vector<Budget>& budgets, const Parts& parts) {
    for (size_t i = 0; i < parts.size(); ++i) {
      for (const Piece& piece : parts[i]) Give(piece, budgets[i].rank);
    }
    const std::vector<LinkRows> links = cut.LinksOf(budgets, parts);
    for (size_t i = 0; i < parts.size(); ++i) {
      const int32_t rank = budgets[i].rank;
      links_[rank].Add(links[i]);
      filling_[rank] = budgets[i].filling * room_[rank];
      Count(rank);
    }
  }

  // Of the ranks with room for so many tokens, a few that will end first if the rest of their room
  // has this `density`: 1024 times the work of a token.
  std::vector<int32_t> NeediestRanks(Wide density, int64_t num_tokens) const {
    std::vector<int32_t> ranks;
    std::vector<int64_t> end(problem_.num_ranks);
    for (int32_t r = 0; r < problem_.num_ranks; ++r) {
      if (room_[r] < num_tokens) continue;
      ranks.push_back(r);
      const auto rest = problem_.TimeOf(static_cast<int64_t>(density * room_[r] / 1024), r);
      end[r] = StepTime(problem_, time_[r] + rest, links_[r].Times(problem_.key_time));
    }
    KeepSmallest(&ranks, std::max<int64_t>(1, problem_.num_ranks / kGroups),
                 [&](int32_t rank) { return end[rank]; });
    return ranks;
  }

  // The ranks [first, last), those with the most time left first.
  std::vector<int32_t> ByTimeLeft(int32_t first, int32_t last) const {
    std::vector<int32_t> ranks(last - first);
    std::iota(ranks.begin(), ranks.end(), first);
    std::stable_sort(ranks.begin(), ranks.end(),
                     [&](int32_t a, int32_t b) { return Left(a) > Left(b); });
    return ranks;
  }

  std::vector<Budget> BudgetsOf(const std::vector<int32_t>& ranks, size_t num, int64_t permille,
                                int32_t document) const {
    std::vector<Budget> budgets;
    int64_t reserved = reserved_;
    for (size_t i = 0; i < num; ++i) {
      const int32_t rank = ranks[i];
      int64_t filling = FillingAfter(reserved);
      if (ranks_[rank].empty()) {
        reserved += room_[rank];
        filling = (filling + FillingAfter(reserved)) / 2;
      }
      filling = problem_.TimeOf(std::max<int64_t>(0, filling + fillings_[document]), rank);
      budgets.push_back({rank, time_[rank] + filling * room_[rank], links_[rank],
                         load_[rank] + Scaled(Left(rank), permille), room_[rank] - room_[rank] / 32,
                         filling});
    }
    return budgets;
  }

  // As few ranks of the node with the most time left as its share of their time allows.
  bool CutInNode(const Piece& item) {
    const auto node =
        static_cast<int32_t>(std::max_element(left_.begin(), left_.end()) - left_.begin());
    const std::vector<int32_t> ranks = ByTimeLeft(node * size_, (node + 1) * size_);
    const DocumentCut cut(problem_, item.document);
    const auto parts = [&](int64_t num, int64_t permille) {
      return cut.Cut(BudgetsOf(ranks, num, permille, item.document));
    };
    const int64_t most = 1000;
    const int64_t least = problem_.Work(item) / std::max<int64_t>(1, Left(ranks[0]));
    if (least > size_) return false;
    const int64_t num = FirstThat(std::max<int64_t>(1, least), size_ + 1,
                                  [&](int64_t num) { return !parts(num, most).empty(); });
    if (num > size_) return false;
    int64_t share = kShareStep * FirstThat(1, most / kShareStep, [&](int64_t steps) {
                      return !parts(num, kShareStep * steps).empty();
                    });
    Parts best = parts(num, share);
    if (best.empty()) share = most, best = parts(num, share);
    Give(cut, BudgetsOf(ranks, num, share, item.document), best);
    return true;
  }

  // As few ranks as its share of their time allows, of the nodes with the most time left.
  bool CutOverNodes(const Piece& item) {
    const int32_t num_nodes = problem_.num_ranks / size_;
    if (num_nodes == 1) return false;
    std::vector<int32_t> nodes(num_nodes), ranks;
    std::iota(nodes.begin(), nodes.end(), 0);
    std::stable_sort(nodes.begin(), nodes.end(),
                     [&](int32_t a, int32_t b) { return left_[a] > left_[b]; });
    for (int32_t node : nodes) {
      for (int32_t rank : ByTimeLeft(node * size_, (node + 1) * size_)) ranks.push_back(rank);
    }
    const DocumentCut cut(problem_, item.document);
    // Neighbours in the document are in different nodes, so that all send as much to other nodes.
    const auto budgets = [&](int64_t num) {
      std::vector<int32_t> taken;
      for (int32_t first = 0; first < size_; ++first) {
        for (int64_t i = first; i < num; i += size_) taken.push_back(ranks[i]);
      }
      return BudgetsOf(taken, num, 1000, item.document);
    };
    const auto fits = [&](int64_t num) { return !cut.Cut(budgets(num)).empty(); };
    const int64_t most = problem_.num_ranks;
    const int64_t share = std::max<int64_t>(1, Left(ranks[0]));
    int64_t low = std::max<int64_t>(size_ + 1, problem_.Work(item) / share);
    low = std::min(low, most);
    int64_t high = low;
    while (high < most && !fits(high)) low = high + 1, high = std::min(most, high + 1 + high / 4);
    const int64_t num = FirstThat(low, high + 1, fits);
    if (num > high) return false;
    Give(cut, budgets(num), cut.Cut(budgets(num)));
    return true;
  }

  // Where there is most room; the rest in the same node, if possible.
  void FillGaps(Piece item) {
    int32_t node = -1;
    while (item.num_tokens() > 0) {
      int32_t best = -1;
      for (int32_t r = 0; r < problem_.num_ranks; ++r) {
        if (room_[r] == 0) continue;
        const bool is_near = r / size_ == node, was_near = best >= 0 && best / size_ == node;
        if (best < 0 || is_near > was_near || (is_near == was_near && room_[r] > room_[best])) {
          best = r;
        }
      }
      const int64_t end = std::min(item.end, item.start + room_[best]);
      Give({item.start, end, item.document}, best);
      item.start = end;
      node = best / size_;
    }
  }

  const PlacementProblem& problem_;
  const Fillings& fillings_;
  const int64_t target_;
  const int32_t size_;  // of a node
  RankPieces ranks_;
  std::vector<int64_t> room_, time_, load_;  // of each rank; the load has its exchange, too
  std::vector<int64_t> filling_;             // time that is expected of what will fill it
  std::vector<int64_t> left_;                // of each node: time until the target
  std::vector<LinkRows> links_;
  std::vector<Piece> whole_, gaps_;
  std::vector<int64_t> fillers_;  // tokens of padding, and up to each whole one, shortest first
  int64_t reserved_ = 0;          // so many of them, for ranks with parts of cut documents
  int64_t mean_filling_ = 0;      // work of a token
  std::vector<int32_t> cut_;
  bool is_fit_ = true;
};

// Brings ranks close to the mean time, by exchanges of documents that are whole. More work of a
// rank is taken as that much more time, of which its exchange may hide a part.
void BalanceTime(const PlacementProblem& problem, RankPieces* ranks) {
  PlacementProblem limited = problem;
  const std::vector<int64_t> times = StepTimes(problem, *ranks);
  const Wide mean = std::accumulate(times.begin(), times.end(), Wide{0}) / problem.num_ranks;
  RankPieces cut(ranks->size());
  for (size_t r = 0; r < ranks->size(); ++r) {
    const Wide left = Scaled(static_cast<int64_t>(mean), kNearMean) - times[r];
    limited.limits[r] = problem.WorkOf((*ranks)[r]) +
                        static_cast<int64_t>(left * problem.speeds[r] / problem.fastest_speed);
    std::vector<Piece> whole;
    for (const Piece& piece : (*ranks)[r]) {
      const bool is_whole = piece.num_tokens() == problem.lengths[piece.document];
      (is_whole ? whole : cut[r]).push_back(piece);
      if (!is_whole) limited.limits[r] -= problem.Work(piece);
    }
    (*ranks)[r] = std::move(whole);
  }
  RepairBalance(limited, ranks, false);
  for (size_t r = 0; r < ranks->size(); ++r) {
    (*ranks)[r].insert((*ranks)[r].end(), cut[r].begin(), cut[r].end());
    SortAndJoin(&(*ranks)[r]);
  }
}

}  // namespace

RankPieces PlaceByTime(const PlacementProblem& problem, std::vector<Piece> items, RankPieces best) {
  std::stable_sort(items.begin(), items.end(),
                   [&](const Piece& a, const Piece& b) { return a.num_tokens() > b.num_tokens(); });
  struct Found {
    PlacementCost cost;
    RankPieces ranks;
  };
  std::vector<Found> found{{CostOf(problem, best), best}};
  if (found[0].cost.excess == 0 || problem.block > 1) return best;
  Wide work = 0;
  for (const Piece& item : items) work += problem.Work(item);
  const Wide speed = std::accumulate(problem.speeds.begin(), problem.speeds.end(), int64_t{0});
  const auto mean = static_cast<int64_t>(work * problem.fastest_speed / speed);
  // The time of the slowest rank: too early, and late enough.
  int64_t low = mean, high = found[0].cost.excess + mean;
  Fillings fillings(problem.lengths.size());
  for (int64_t i = 0; i < kTargets; ++i) {
    const int64_t middle = low + (high - low) / (high > 2 * low ? 4 : 3);
    Placer placer(problem, fillings, middle);
    const bool fits = placer.CutLong(items) && placer.MeanTime() <= middle;
    (fits ? high : low) = middle;
  }
  const int64_t num_learned = problem.num_ranks <= kRanksOfFew ? kLearnedOfFew : kLearned;
  for (int64_t i = 0; i < num_learned; ++i) {
    Placer placer(problem, fillings, high);
    const bool is_fit = placer.CutLong(items);
    RankPieces ranks = placer.Fill();
    found.push_back({CostOf(problem, ranks), std::move(ranks)});
    if (is_fit) {
      placer.Learn(&fillings);
    } else {
      high += high / 100;
    }
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Found& a, const Found& b) { return a.cost < b.cost; });
  Found least = found[0];
  for (int64_t i = 0; i < kBalances; ++i) {
    BalanceTime(problem, &found[0].ranks);
    const PlacementCost cost = CostOf(problem, found[0].ranks);
    if (!(cost < least.cost)) break;
    least = {cost, found[0].ranks};
  }
  return least.ranks;
}

}  // namespace cpd
