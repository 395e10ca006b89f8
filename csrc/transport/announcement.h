// Messages about an exchange between processes of one host.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "transport/transport.h"

namespace cpd {

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

std::string ToBytes(const Announcement& announcement);
std::string ToBytes(const SignalNotice& notice);
std::string ToBytes(const FailureNotice& notice);
// kReady: the rows are staged for the readers. kDone: the sender no longer reads them. kOver: as
// kDone, and all tasks that wait for other processes have succeeded. `meeting` is the exchange, as
// numbered by the receiver.
std::string ToBytes(MessageKind kind, int64_t meeting);
std::string ToBytes(const Description& description);

// Returns false if the bytes are not a message.
bool FromBytes(std::string_view bytes, Announcement* announcement);
bool FromBytes(std::string_view bytes, SignalNotice* notice);
bool FromBytes(std::string_view bytes, FailureNotice* notice);
bool FromBytes(std::string_view bytes, int64_t* meeting);
bool FromBytes(std::string_view bytes, Description* description);

}  // namespace cpd
