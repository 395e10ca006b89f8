// Messages about an exchange between processes of one host.
#include "transport/announcement.h"

namespace cpd {
namespace {

constexpr size_t kMaxMessageText = 4096;  // a message must fit one packet

bool GetString(ByteReader* reader, std::string* text) {
  std::string_view view;
  if (!reader->GetText(&view)) return false;
  text->assign(view);
  return true;
}

}  // namespace

std::string ToBytes(const FailureNotice& notice) {
  ByteWriter writer;
  writer.Put(MessageKind::kFail);
  writer.Put(notice.run_id);
  writer.Put(notice.deadline_ms);
  writer.Put(notice.code);
  writer.PutText(std::string_view(notice.message).substr(0, kMaxMessageText));
  return std::move(writer).Finish();
}

std::string ToBytes(const Description& description) {
  ByteWriter writer;
  writer.PutText(description.op);
  writer.PutText(description.signature);
  writer.Put<int64_t>(description.array_offsets.size());
  for (const int64_t offset : description.array_offsets) writer.Put(offset);
  writer.PutText(description.contribution);
  return std::move(writer).Finish();
}

bool FromBytes(std::string_view bytes, FailureNotice* notice) {
  ByteReader reader(bytes);
  MessageKind kind;
  return reader.Get(&kind) && reader.Get(&notice->run_id) && reader.Get(&notice->deadline_ms) &&
         reader.Get(&notice->code) && GetString(&reader, &notice->message);
}

bool FromBytes(std::string_view bytes, Description* description) {
  ByteReader reader(bytes);
  int64_t num_arrays = 0;
  if (!GetString(&reader, &description->op) || !GetString(&reader, &description->signature) ||
      !reader.Get(&num_arrays) || num_arrays < 0 ||
      num_arrays > reader.num_left() / static_cast<int64_t>(sizeof(int64_t))) {
    return false;
  }
  description->array_offsets.resize(num_arrays);
  for (int64_t& offset : description->array_offsets) {
    if (!reader.Get(&offset)) return false;
  }
  return GetString(&reader, &description->contribution) && reader.num_left() == 0;
}

}  // namespace cpd
