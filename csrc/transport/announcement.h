// What processes of one host tell each other about an exchange.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "transport/transport.h"

namespace cpd {

enum class MessageKind : uint8_t { kAnnounce, kReady, kSignal, kOver, kDone, kFail };

// A rank has arrived. What it brings lies in its process's segment, so that messages stay small.
struct Announcement {
  ExchangeKey key;
  int32_t rank;
  int32_t num_ranks;
  int64_t meeting;  // the exchange, as its process numbers it
  int64_t deadline_ms;
  int64_t offset;     // in the segment
  int64_t num_bytes;  // of what follows there: a `Description`
};

// What an announcement points to. The rows themselves come later.
struct Description {
  std::string op;
  std::string signature;
  std::vector<int64_t> array_offsets;  // in the segment, where ranks elsewhere read each array
  std::string contribution;            // Contribution::Write()
};

// A rank of the sender's has added to a counter of a rank of the receiver's.
struct SignalNotice {
  int64_t meeting;  // the exchange, as the receiver numbers it
  int32_t rank;
  int32_t counter;
};

// An execution has failed in the process that sends this.
struct FailureNotice {
  int64_t run_id;
  int64_t deadline_ms;
  StatusCode code;
  std::string message;
};

std::string ToBytes(const Announcement& announcement);
std::string ToBytes(const SignalNotice& notice);
std::string ToBytes(const FailureNotice& notice);
// kReady: the rows lie where they are read; kDone: they are not read any more; kOver: the same, and
// pieces of work that wait for ranks elsewhere have all succeeded. `meeting` is the exchange as the
// receiver numbers it.
std::string ToBytes(MessageKind kind, int64_t meeting);
std::string ToBytes(const Description& description);

// False: the bytes are none.
bool FromBytes(std::string_view bytes, Announcement* announcement);
bool FromBytes(std::string_view bytes, SignalNotice* notice);
bool FromBytes(std::string_view bytes, FailureNotice* notice);
bool FromBytes(std::string_view bytes, int64_t* meeting);
bool FromBytes(std::string_view bytes, Description* description);

}  // namespace cpd
