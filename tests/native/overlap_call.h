// Runs an overlapped GEMM on all ranks and checks its results, without XLA, Python or a BLAS:
// streams are threads, and the GEMM is a plain loop or a function of the test.
#pragma once

#include <algorithm>
#include <thread>

#include "gemm/comm_overlap.h"
#include "plain_gemm.h"
#include "ranks.h"
#include "transport/completion_pool.h"
#include "transport/team.h"

namespace cpd {

using std::chrono::milliseconds;

enum ArrayName { kLhs, kRhs, kBias, kAuxIn };
using Values = std::function<float(ArrayName name, int rank, int64_t row, int64_t column)>;

// Values whose sums of products are exact, in every order and in bfloat16.
inline float SmallInteger(ArrayName name, int rank, int64_t row, int64_t column) {
  uint32_t x = static_cast<uint32_t>(((name * 31 + rank) * 31 + row) * 31 + column) * 2654435761u;
  x = (x ^ x >> 15) * 0x2c1b3c6du;
  return static_cast<float>(static_cast<int>((x ^ x >> 12) % 5) - 2);
}

struct StandIns {
  GemmFunction gemm = PlainGemm;
  Link link = CopyRows;
  std::function<void(int rank)> read = {};  // before it reads peers without a put
  std::function<void()> failed = {};        // a stream has ended, and the call has failed
  milliseconds deadline{60000};
};

// A thread for every stream.
inline CompletionPool& Pool() {
  static auto* pool = new CompletionPool;  // its threads may outlive main()
  return *pool;
}

class Call {
 public:
  // `problem` has no memory; its m is used if the product is independent (bulk).
  explicit Call(OverlapProblem problem, bool has_bias = false, Values values = SmallInteger)
      : p_(std::move(problem)),
        gathers_(p_.config.type == CommType::kAllGather),
        is_bulk_(p_.config.method == CommMethod::kBulk) {
    const int64_t alone = p_.rows.num_batches * p_.rows.capacity;
    const int64_t together = p_.rows.num_batches * p_.rows.total();
    const int64_t rows_in = gathers_ ? alone : together, rows_out = gathers_ ? together : alone;
    if (!is_bulk_) p_.m = together;
    ranks_.resize(p_.num_ranks());
    for (int rank = 0; rank < p_.num_ranks(); ++rank) {
      Arrays& a = ranks_[rank];
      a.lhs = Array(p_.lhs_type, is_bulk_ ? p_.m : rows_in, p_.k, p_.lhs_transposed);
      a.rhs = Array(p_.rhs_type, p_.k, p_.n, p_.rhs_transposed);
      a.output = Array(p_.output_type, is_bulk_ ? p_.m : rows_out, p_.n);
      const auto fill = [&](Array* array, ArrayName name, int64_t num_rows, int64_t num_columns) {
        // Capacity without rows stays poisoned: a read would spread the poison.
        const bool has_room = gathers_ && name == (is_bulk_ ? kAuxIn : kLhs);
        for (int64_t i = 0; i < num_rows; ++i) {
          if (has_room && i % p_.rows.capacity >= p_.rows.counts[rank]) continue;
          for (int64_t j = 0; j < num_columns; ++j) array->Set(i, j, values(name, rank, i, j));
        }
      };
      fill(&a.lhs, kLhs, is_bulk_ ? p_.m : rows_in, p_.k);
      fill(&a.rhs, kRhs, p_.k, p_.n);
      if (has_bias) {
        a.bias = Array(p_.output_type, 1, p_.n);
        fill(&a.bias, kBias, 1, p_.n);
      }
      if (is_bulk_) {
        a.aux_in = Array(p_.aux_type, rows_in, p_.aux_width);
        fill(&a.aux_in, kAuxIn, rows_in, p_.aux_width);
        a.aux_out = Array(p_.aux_type, rows_out, p_.aux_width);
      } else if (p_.gathers_to_aux) {
        a.aux_out = Array(p_.lhs_type, together, p_.k);
      } else if (gathers_ && p_.in_ring_order) {
        a.aux_out = Array(p_.lhs_type, alone, p_.k);
      }
      if (const int64_t bytes = BufferBytes(p_)) a.buffer = Array(DataType::kI8, 1, bytes);
      p_.ranks.push_back({a.lhs.data(), a.rhs.data(), a.bias.data(), a.aux_in.data(),
                          a.output.data(), a.aux_out.data(), a.buffer.data()});
    }
  }

  Status Run(const StandIns& stand_ins = {}) const {
    const auto core = MakeCommOverlap(p_, std::make_shared<HostArithmetic>(stand_ins.gemm));
    Schedule schedule = core->Record();
    for (size_t i = 0; i < schedule.streams.size() && stand_ins.read; ++i) {
      for (Step& step : schedule.streams[i].steps) {
        if (step.kind != Step::Kind::kRun || step.span != SpanKind::kCommunication) continue;
        step.work = [&stand_ins, rank = static_cast<int>(i / 2),
                     work = std::move(step.work)](Counters& counters) {
          stand_ins.read(rank);
          work(counters);
        };
      }
    }
    Team team({"test", 7, stand_ins.deadline}, std::move(schedule), core->num_signals(),
              stand_ins.link);
    std::vector<std::future<void>> ends;
    for (const int task : team.Tasks()) {
      auto end = std::make_shared<std::promise<void>>();
      ends.push_back(end->get_future());
      Pool().Run([&team, &stand_ins, task, end] {
        team.Run(task);
        if (stand_ins.failed && !team.status().ok()) stand_ins.failed();
        end->set_value();
      });
    }
    for (std::future<void>& end : ends) end.wait();
    return team.status();
  }

  // Whether every element of every result equals that of a plain computation, and nothing else has
  // been written.
  bool IsRight() const {
    for (int rank = 0; rank < p_.num_ranks(); ++rank) {
      const Arrays& a = ranks_[rank];
      for (const Array* array :
           {&a.lhs, &a.rhs, &a.bias, &a.aux_in, &a.output, &a.aux_out, &a.buffer}) {
        if (!array->IsIntact()) return Complain("bytes behind an array", rank, 0, 0, 0, 0);
      }
      if (!(is_bulk_   ? BulkIsRight(rank)
            : gathers_ ? ProductOfGatheredIsRight(rank)
                       : SumIsRight(rank, "output", p_.n, a.output, p_.output_type,
                                    [this](int peer, int64_t row, int64_t column) {
                                      return Product(peer, ranks_[peer].lhs, row, column);
                                    }))) {
        return false;
      }
    }
    return true;
  }

  // The rank that owns this memory.
  int RankOf(const char* address) const {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      const Arrays& a = ranks_[rank];
      for (const Array* array :
           {&a.lhs, &a.rhs, &a.bias, &a.aux_in, &a.output, &a.aux_out, &a.buffer}) {
        if (array->Holds(address)) return static_cast<int>(rank);
      }
    }
    return -1;
  }

  // Steps in which a rank reads from its peers.
  int num_reads_expected() const {
    return p_.config.method == CommMethod::kPipeline ? static_cast<int>(p_.config.num_splits) : 1;
  }

  const OverlapProblem& problem() const { return p_; }
  const Array& output(int rank) const { return ranks_[rank].output; }
  const Array& aux_out(int rank) const { return ranks_[rank].aux_out; }

 private:
  struct Arrays {
    Array lhs, rhs, bias, aux_in, output, aux_out, buffer;
  };

  bool Complain(const char* what, int rank, int64_t row, int64_t column, float got,
                float expected) const {
    const OverlapConfig& c = p_.config;
    std::fprintf(stderr,
                 "type %d, method %d, splits %d, atomic %d, overlap_first_gemm %d, aggregate %d, "
                 "copies %d, in_ring_order %d, gathers_to_aux %d; %d ranks, %d batches: "
                 "%s of rank %d [%d, %d]: got %g, expected %g\n",
                 static_cast<int>(c.type), static_cast<int>(c.method),
                 static_cast<int>(c.num_splits), c.atomic, c.overlap_first_gemm, c.aggregate,
                 c.copies, p_.in_ring_order, p_.gathers_to_aux, p_.num_ranks(),
                 static_cast<int>(p_.rows.num_batches), what, rank, static_cast<int>(row),
                 static_cast<int>(column), got, expected);
    return false;
  }

  bool RowIs(const char* what, int rank, const Array& array, int64_t row, int64_t num_columns,
             const std::function<float(int64_t column)>& expected) const {
    for (int64_t j = 0; j < num_columns; ++j) {
      const float got = array(row, j), wanted = expected(j);
      if (ToBits(got) != ToBits(wanted)) return Complain(what, rank, row, j, got, wanted);
    }
    return true;
  }

  float Bias(int rank, int64_t column) const {
    return ranks_[rank].bias.data() ? ranks_[rank].bias(0, column) : 0;
  }

  float Product(int rank, const Array& lhs, int64_t row, int64_t column) const {
    return Dot(lhs.matrix(), row, ranks_[rank].rhs.matrix(), column, p_.k);
  }

  // The start of a chunk among all rows of a batch, in the order of `rank`.
  int64_t Begin(int rank, int chunk) const {
    const int p = p_.num_ranks();
    int64_t begin = 0;
    for (int step = 0;; ++step) {
      const int here = p_.in_ring_order ? (rank - 1 - step + 2 * p) % p : step;
      if (here == chunk) return begin;
      begin += p_.rows.counts[here];
    }
  }

  // Calls `is_right` for each row of a chunk: its position among all rows, and within the chunk.
  bool AllRows(int rank, int chunk, const std::function<bool(int64_t, int64_t)>& is_right) const {
    for (int64_t batch = 0; batch < p_.rows.num_batches; ++batch) {
      for (int64_t i = 0; i < p_.rows.counts[chunk]; ++i) {
        if (!is_right(batch * p_.rows.total() + Begin(rank, chunk) + i,
                      batch * p_.rows.capacity + i)) {
          return false;
        }
      }
    }
    return true;
  }

  bool ProductOfGatheredIsRight(int rank) const {
    const Arrays& a = ranks_[rank];
    for (int chunk = 0; chunk < p_.num_ranks(); ++chunk) {
      const Array& lhs = ranks_[chunk].lhs;
      const bool is_right = AllRows(rank, chunk, [&](int64_t together, int64_t alone) {
        const auto product = [&](int64_t j) {
          return RoundTo(p_.output_type, Product(rank, lhs, alone, j) + Bias(rank, j));
        };
        if (!RowIs("output", rank, a.output, together, p_.n, product)) return false;
        const auto element = [&](int64_t j) { return lhs(alone, j); };
        if (p_.gathers_to_aux) {
          return RowIs("gathered lhs", rank, a.aux_out, together, p_.k, element);
        }
        const bool gives_back = p_.in_ring_order && chunk == rank;
        return !gives_back || RowIs("own rows", rank, a.aux_out, alone, p_.k, element);
      });
      if (!is_right) return false;
    }
    return true;
  }

  // Addends are rounded to their stored type, summed in float32 in rank order, and rounded again.
  bool SumIsRight(int rank, const char* what, int64_t num_columns, const Array& output,
                  DataType type,
                  const std::function<float(int peer, int64_t row, int64_t column)>& part) const {
    // Without copies there are no addends: each rank multiplies the operands of all.
    const DataType part_type = is_bulk_            ? p_.aux_type
                               : !p_.config.copies ? DataType::kF32
                                                   : p_.partial_type;
    for (int64_t batch = 0; batch < p_.rows.num_batches; ++batch) {
      for (int64_t i = 0; i < p_.rows.capacity; ++i) {
        const auto sum = [&](int64_t j) {
          if (i >= p_.rows.counts[rank]) return 0.0f;
          float sum = 0;
          for (int peer = 0; peer < p_.num_ranks(); ++peer) {
            const int64_t row = batch * p_.rows.total() + Begin(peer, rank) + i;
            sum += RoundTo(part_type, part(peer, row, j));
          }
          return RoundTo(type, sum + (is_bulk_ ? 0 : Bias(rank, j)));
        };
        if (!RowIs(what, rank, output, batch * p_.rows.capacity + i, num_columns, sum)) {
          return false;
        }
      }
    }
    return true;
  }

  bool BulkIsRight(int rank) const {
    const Arrays& a = ranks_[rank];
    for (int64_t i = 0; i < p_.m; ++i) {
      const auto product = [&](int64_t j) {
        return RoundTo(p_.output_type, Product(rank, a.lhs, i, j) + Bias(rank, j));
      };
      if (!RowIs("output", rank, a.output, i, p_.n, product)) return false;
    }
    if (!gathers_) {
      return SumIsRight(rank, "aux_out", p_.aux_width, a.aux_out, p_.aux_type,
                        [this](int peer, int64_t row, int64_t column) {
                          return ranks_[peer].aux_in(row, column);
                        });
    }
    for (int chunk = 0; chunk < p_.num_ranks(); ++chunk) {
      const bool is_right = AllRows(rank, chunk, [&](int64_t together, int64_t alone) {
        return RowIs("aux_out", rank, a.aux_out, together, p_.aux_width,
                     [&](int64_t j) { return ranks_[chunk].aux_in(alone, j); });
      });
      if (!is_right) return false;
    }
    return true;
  }

  OverlapProblem p_;
  const bool gathers_, is_bulk_;
  std::vector<Arrays> ranks_;
};

}  // namespace cpd
