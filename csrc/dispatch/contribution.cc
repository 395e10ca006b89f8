// One rank's contribution to a dispatch or combine, as bytes for the ranks of other processes.
#include <limits>
#include <utility>

#include "dispatch/dispatch.h"
#include "transport/meeting.h"

namespace cpd {
namespace {

// Sizes that no memory could hold would overflow later.
template <typename Bytes>
bool Transfer(Bytes& bytes, RowArray& array) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return bytes.Value(array.num_rows) && bytes.Value(array.row_bytes) && array.num_rows >= 0 &&
         array.row_bytes >= 0 &&
         (array.row_bytes == 0 || array.num_rows <= kMost / array.row_bytes);
}

template <typename Bytes>
bool Transfer(Bytes& bytes, int64_t count, DispatchContribution& rank, IntArray& array) {
  if constexpr (Bytes::kReads) {
    if (count > bytes.num_left() / 8) return false;
    std::vector<int64_t>& integers = rank.integers.emplace_back(count);
    for (int64_t& value : integers) bytes.Value(value);
    // Moving the vector of vectors leaves the integers in place. An empty field still needs an
    // address: a field without one is absent.
    static const int64_t kNone = 0;
    array = {count > 0 ? integers.data() : &kNone, IntType::kI64};
  } else {
    for (int64_t i = 0; i < count; ++i) bytes.Value(array[i]);
  }
  return true;
}

template <typename Bytes>
bool Transfer(Bytes& bytes, DispatchContribution& rank, OperandGroup& group) {
  auto num_arrays = static_cast<int64_t>(group.tokens.size());
  if (!bytes.Value(num_arrays) || num_arrays < 0 || num_arrays > bytes.num_left()) return false;
  group.tokens.resize(num_arrays);
  group.buffers.resize(num_arrays);
  group.types.resize(num_arrays);
  for (int64_t a = 0; a < num_arrays; ++a) {
    if (!Transfer(bytes, group.tokens[a]) || !Transfer(bytes, group.buffers[a]) ||
        !bytes.Value(group.types[a])) {
      return false;
    }
  }
  uint8_t has_src_offset = group.src_offset ? 1 : 0, has_fingerprint = group.fingerprint ? 1 : 0;
  if (!bytes.Value(group.num_slots) || !bytes.Value(group.num_replicas) ||
      !bytes.Value(has_src_offset) || !bytes.Value(has_fingerprint)) {
    return false;
  }
  const int64_t slots = group.num_slots, replicas = group.num_replicas;
  if (slots < 0 || replicas < 0 || (replicas > 0 && slots > bytes.num_left() / replicas)) {
    return false;
  }
  return Transfer(bytes, rank.num_ranks + 1, rank, group.num_recv_tokens) &&
         Transfer(bytes, slots, rank, group.seq_len) &&
         Transfer(bytes, slots * replicas, rank, group.dst_rank) &&
         Transfer(bytes, slots * replicas, rank, group.dst_offset) &&
         (!has_src_offset || Transfer(bytes, slots, rank, group.src_offset)) &&
         (!has_fingerprint || Transfer(bytes, kFingerprintSize, rank, group.fingerprint));
}

template <typename Bytes>
bool Transfer(Bytes& bytes, DispatchContribution& rank) {
  auto num_groups = static_cast<int64_t>(rank.groups.size());
  if (!bytes.Value(num_groups) || num_groups < 0 || num_groups > bytes.num_left()) return false;
  rank.groups.resize(num_groups);
  for (OperandGroup& group : rank.groups) {
    if (!Transfer(bytes, rank, group)) return false;
  }
  return true;
}

}  // namespace

void OperandGroup::Select(int64_t rank) {
  if (num_views == 1) return;
  num_recv_tokens = num_recv_tokens.From(rank * (num_views + 1));
  seq_len = seq_len.From(rank * num_slots);
  dst_rank = dst_rank.From(rank * num_slots * num_replicas);
  dst_offset = dst_offset.From(rank * num_slots * num_replicas);
  if (src_offset) src_offset = src_offset.From(rank * num_slots);
  num_views = 1;
}

std::string DispatchContribution::Write() const {
  ByteWriter writer;
  DispatchContribution copy;
  copy.num_ranks = num_ranks;
  copy.groups = groups;
  Transfer(writer, copy);
  return std::move(writer).Finish();
}

std::vector<SharedArray> DispatchContribution::SharedArrays() {
  std::vector<SharedArray> shared;
  for (OperandGroup& group : groups) {
    for (RowArray& array : direction == Direction::kDispatch ? group.tokens : group.buffers) {
      shared.push_back({&array.shared, array.num_bytes()});
    }
  }
  return shared;
}

std::unique_ptr<Contribution> ReadDispatchContribution(Direction direction, int num_ranks,
                                                       std::string_view bytes) {
  auto rank = std::make_unique<DispatchContribution>();
  rank->direction = direction;
  rank->num_ranks = num_ranks;
  ByteReader reader(bytes);
  if (!Transfer(reader, *rank) || reader.num_left() != 0) return nullptr;
  return rank;
}

}  // namespace cpd
