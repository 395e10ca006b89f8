// One rank's contribution to a dispatch or combine, as bytes for the ranks of other processes.
#include <cstring>
#include <limits>
#include <utility>

#include "dispatch/dispatch.h"
#include "transport/announcement.h"

namespace cpd {
namespace {

void WriteIntegers(const IntArray& array, int64_t count, ByteWriter* writer) {
  writer->Put<int64_t>(count);
  for (int64_t i = 0; i < count; ++i) writer->Put<int64_t>(array[i]);
}

void WriteRows(const RowArray& array, ByteWriter* writer) {
  writer->Put(array.num_rows);
  writer->Put(array.row_bytes);
}

// Sizes that no memory could hold would overflow later.
bool ReadRows(ByteReader* reader, RowArray* array) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  return reader->Get(&array->num_rows) && reader->Get(&array->row_bytes) && array->num_rows >= 0 &&
         array->row_bytes >= 0 &&
         (array->row_bytes == 0 || array->num_rows <= kMost / array->row_bytes);
}

bool ReadIntegers(ByteReader* reader, int64_t expected, DispatchContribution* rank,
                  IntArray* array) {
  int64_t count = 0;
  if (!reader->Get(&count) || count != expected || count > reader->num_left() / 8) return false;
  std::vector<int64_t>& integers = rank->integers.emplace_back(count);
  for (int64_t& value : integers) {
    if (!reader->Get(&value)) return false;
  }
  // Moving the vector of vectors leaves the integers in place. An empty field still needs an
  // address: a field without one is absent.
  static const int64_t kNone = 0;
  *array = {count > 0 ? integers.data() : &kNone, IntType::kI64};
  return true;
}

bool ReadPart(ByteReader* reader, DispatchContribution* rank, OperandGroup* group) {
  int64_t num_arrays = 0;
  if (!reader->Get(&num_arrays) || num_arrays < 0 || num_arrays > reader->num_left()) return false;
  for (int64_t a = 0; a < num_arrays; ++a) {
    RowArray tokens, buffer;
    SumTypes types;
    if (!ReadRows(reader, &tokens) || !ReadRows(reader, &buffer) || !reader->Get(&types.in) ||
        !reader->Get(&types.out)) {
      return false;
    }
    group->tokens.push_back(tokens);
    group->buffers.push_back(buffer);
    group->types.push_back(types);
  }
  uint8_t has_src_offset = 0, has_fingerprint = 0;
  if (!reader->Get(&group->num_slots) || !reader->Get(&group->num_replicas) ||
      !reader->Get(&has_src_offset) || !reader->Get(&has_fingerprint)) {
    return false;
  }
  const int64_t slots = group->num_slots, replicas = group->num_replicas;
  if (slots < 0 || replicas < 0 || (replicas > 0 && slots > reader->num_left() / replicas)) {
    return false;
  }
  return ReadIntegers(reader, rank->num_ranks + 1, rank, &group->num_recv_tokens) &&
         ReadIntegers(reader, slots, rank, &group->seq_len) &&
         ReadIntegers(reader, slots * replicas, rank, &group->dst_rank) &&
         ReadIntegers(reader, slots * replicas, rank, &group->dst_offset) &&
         (!has_src_offset || ReadIntegers(reader, slots, rank, &group->src_offset)) &&
         (!has_fingerprint || ReadIntegers(reader, kFingerprintSize, rank, &group->fingerprint));
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
  writer.Put<int64_t>(groups.size());
  for (const OperandGroup& group : groups) {
    writer.Put<int64_t>(group.tokens.size());
    for (size_t a = 0; a < group.tokens.size(); ++a) {
      WriteRows(group.tokens[a], &writer);
      WriteRows(group.buffers[a], &writer);
      const SumTypes types = a < group.types.size() ? group.types[a] : SumTypes{};
      writer.Put(types.in);
      writer.Put(types.out);
    }
    writer.Put(group.num_slots);
    writer.Put(group.num_replicas);
    writer.Put<uint8_t>(group.src_offset ? 1 : 0);
    writer.Put<uint8_t>(group.fingerprint ? 1 : 0);
    WriteIntegers(group.num_recv_tokens, num_ranks + 1, &writer);
    WriteIntegers(group.seq_len, group.num_slots, &writer);
    WriteIntegers(group.dst_rank, group.num_slots * group.num_replicas, &writer);
    WriteIntegers(group.dst_offset, group.num_slots * group.num_replicas, &writer);
    if (group.src_offset) WriteIntegers(group.src_offset, group.num_slots, &writer);
    if (group.fingerprint) WriteIntegers(group.fingerprint, kFingerprintSize, &writer);
  }
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
  int64_t num_groups = 0;
  if (!reader.Get(&num_groups) || num_groups < 0 || num_groups > reader.num_left()) return nullptr;
  rank->groups.resize(num_groups);
  for (OperandGroup& group : rank->groups) {
    if (!ReadPart(&reader, rank.get(), &group)) return nullptr;
  }
  if (reader.num_left() != 0) return nullptr;
  return rank;
}

}  // namespace cpd
