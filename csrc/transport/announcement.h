// Plain values to bytes and back, for messages between processes of one host.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace cpd {

class ByteWriter {
 public:
  template <typename T>
  void Put(T value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
  }

  void PutText(std::string_view text) {
    Put<int64_t>(text.size());
    bytes_.append(text);
  }

  std::string Finish() && { return std::move(bytes_); }

 private:
  std::string bytes_;
};

// Every read returns whether there were enough bytes.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  bool Get(T* value) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (bytes_.size() < sizeof(T)) return false;
    std::memcpy(value, bytes_.data(), sizeof(T));
    bytes_.remove_prefix(sizeof(T));
    return true;
  }

  bool GetText(std::string_view* text) {
    int64_t size = 0;
    if (!Get(&size) || size < 0 || size > num_left()) return false;
    *text = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return true;
  }

  int64_t num_left() const { return static_cast<int64_t>(bytes_.size()); }
  std::string_view rest() const { return bytes_; }

 private:
  std::string_view bytes_;
};

// ---- Messages about an exchange between processes of one host.

enum class MessageKind : uint8_t { kAnnounce, kReady, kSignal, kOver, kDone, kFail };

// A rank has arrived. Its contribution is in its process's segment, so messages stay small.
struct Announcement {
  ExchangeKey key;
  int32_t rank;
  int32_t num_ranks;
  int64_t meeting;  // the exchange, as numbered by the sender
  int64_t deadline_ms;
  int64_t offset;     // in the segment
  int64_t num_bytes;  // of the `Description` there
};

// The target of an announcement. The rows themselves come later.
struct Description {
  std::string op;
  std::string signature;
  std::vector<int64_t> array_offsets;  // in the segment, where other processes read each array
  std::string contribution;            // Contribution::Write()
};

// A rank of the sender has added to a counter of a rank of the receiver.
struct SignalNotice {
  int64_t meeting;  // the exchange, as numbered by the receiver
  int32_t rank;
  int32_t counter;
};

// An execution has failed in the sending process.
struct FailureNotice {
  int64_t run_id;
  int64_t deadline_ms;
  StatusCode code;
  std::string message;
};

// A plain value: of kAnnounce and kSignal those above, of the others the exchange, as numbered by
// the receiver. kReady: the rows are staged for the readers. kDone: the sender no longer reads
// them. kOver: as kDone, and all tasks that wait for other processes have succeeded.
template <typename T>
std::string ToBytes(MessageKind kind, const T& value) {
  ByteWriter writer;
  writer.Put(kind);
  writer.Put(value);
  return std::move(writer).Finish();
}
std::string ToBytes(const FailureNotice& notice);
std::string ToBytes(const Description& description);

// Returns false if the bytes are not a message.
template <typename T>
bool FromBytes(std::string_view bytes, T* value) {
  ByteReader reader(bytes);
  MessageKind kind;
  return reader.Get(&kind) && reader.Get(value);
}
bool FromBytes(std::string_view bytes, FailureNotice* notice);
bool FromBytes(std::string_view bytes, Description* description);

}  // namespace cpd
