// One exchange, as seen by one process: arrived ranks, progress, and the words for what is missing.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace cpd {

// ---- Values to bytes and back, for messages between processes of one host.

// Both directions have the same functions, so one function writes a value and reads it. Each
// returns whether there were enough bytes.
class ByteWriter {
 public:
  static constexpr bool kReads = false;

  template <typename T>
  bool Value(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    return true;
  }
  bool Text(std::string_view text) {
    Value(static_cast<int64_t>(text.size()));
    bytes_.append(text);
    return true;
  }

  int64_t num_left() const { return std::numeric_limits<int64_t>::max(); }
  std::string Finish() && { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class ByteReader {
 public:
  static constexpr bool kReads = true;

  explicit ByteReader(std::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  bool Value(T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    if (bytes_.size() < sizeof(T)) return false;
    std::memcpy(&value, bytes_.data(), sizeof(T));
    bytes_.remove_prefix(sizeof(T));
    return true;
  }
  bool Text(std::string& text) {
    int64_t size = 0;
    if (!Value(size) || size < 0 || size > num_left()) return false;
    text.assign(bytes_.substr(0, size));
    bytes_.remove_prefix(size);
    return true;
  }

  int64_t num_left() const { return static_cast<int64_t>(bytes_.size()); }

 private:
  std::string_view bytes_;
};

// ---- Messages about an exchange between processes of one host.

// The last is no message, but what an announcement points to.
enum class MessageKind : uint8_t { kAnnounce, kReady, kSignal, kOver, kDone, kFail, kDescription };

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

template <typename Bytes, typename T>
bool Transfer(Bytes& bytes, T& value) {
  return bytes.Value(value);
}

template <typename Bytes>
bool Transfer(Bytes& bytes, FailureNotice& notice) {
  return bytes.Value(notice.run_id) && bytes.Value(notice.deadline_ms) &&
         bytes.Value(notice.code) && bytes.Text(notice.message);
}

template <typename Bytes>
bool Transfer(Bytes& bytes, Description& description) {
  auto num_arrays = static_cast<int64_t>(description.array_offsets.size());
  if (!bytes.Text(description.op) || !bytes.Text(description.signature) ||
      !bytes.Value(num_arrays) || num_arrays < 0 ||
      num_arrays > bytes.num_left() / static_cast<int64_t>(sizeof(int64_t))) {
    return false;
  }
  description.array_offsets.resize(num_arrays);
  for (int64_t& offset : description.array_offsets) {
    if (!bytes.Value(offset)) return false;
  }
  return bytes.Text(description.contribution);
}

// The value of kAnnounce, kSignal and kFail is one of those above; of the others it is the
// exchange, as numbered by the receiver. kReady: the rows are staged for the readers. kDone: the
// sender no longer reads them. kOver: as kDone, and all tasks that wait for other processes have
// succeeded.
template <typename T>
std::string ToBytes(MessageKind kind, T value) {
  ByteWriter writer;
  writer.Value(kind);
  Transfer(writer, value);
  return std::move(writer).Finish();
}

// Returns false if the bytes are not such a message.
template <typename T>
bool FromBytes(std::string_view bytes, T* value) {
  ByteReader reader(bytes);
  MessageKind kind;
  return reader.Value(kind) && Transfer(reader, *value) && reader.num_left() == 0;
}

enum class Phase : uint8_t {
  kMeeting,  // ranks are missing
  kStaging,  // planned; rows are being copied to where other processes read them
  kWaiting,  // for the rows of the other processes
  kPulling,  // local ranks receive rows, or tasks wait for ranks elsewhere
  kEnding,   // local tasks have succeeded; waiting for those of the other processes
  kOver,     // local ranks have been notified; others may still read this process's rows
};

struct Meeting {
  int64_t id;  // in this process
  ExchangeKey key;
  std::string op;
  std::string signature;
  std::chrono::milliseconds deadline;
  std::chrono::steady_clock::time_point began;
  std::chrono::steady_clock::time_point expires;  // if a local rank waits
  bool is_overdue = false;  // expired once; messages that have arrived are still unread
  Phase phase = Phase::kMeeting;

  // From the first local rank to arrive. Until then, only ranks elsewhere have announced
  // themselves.
  Exchange exchange;
  bool has_exchange = false;

  // ---- By rank.
  int num_arrived = 0;
  std::vector<bool> arrived;
  std::vector<int> process;  // of the ranks that have arrived
  std::vector<std::unique_ptr<Contribution>> contributions;
  std::vector<Description> descriptions;  // of ranks elsewhere
  std::vector<Completion> completions;    // of local ranks

  // ---- By process, without this one; empty if all ranks are here.
  struct Participant {
    int64_t meeting = -1;   // the exchange, as numbered by that process; -1: nothing announced yet
    bool is_ready = false;  // its rows are staged for ranks of this process
    bool is_over = false;   // its tasks have succeeded
    bool is_done = false;   // it no longer reads rows of this process
  };
  std::map<int, Participant> participants;

  std::vector<std::pair<int64_t, int64_t>> ranges;  // of the segment: offset, bytes
  WorkList work;
  Status failure;  // of an execution that failed while tasks were running

  int num_ranks() const { return static_cast<int>(arrived.size()); }
  bool IsLocal() const { return participants.empty(); }
  // Whether local ranks wait for others, by the deadline. Without a local rank nothing waits here:
  // the processes that have one know more and will report.
  bool Waits() const {
    return has_exchange &&
           (phase == Phase::kMeeting || phase == Phase::kWaiting || phase == Phase::kEnding);
  }

  // Whether all other processes have come so far.
  bool All(bool Participant::* have) const {
    return std::all_of(participants.begin(), participants.end(),
                       [have](const auto& other) { return other.second.*have; });
  }

  // Whether this process still needs something from `process`, which has ended.
  bool Misses(int process) const {
    const Participant& its = participants.at(process);
    switch (phase) {
      case Phase::kMeeting:
      case Phase::kStaging:  // the plan is not known yet
        return !its.is_ready;
      case Phase::kWaiting: return work.tasks_wait ? !its.is_over : !its.is_ready;
      case Phase::kPulling: return work.tasks_wait && !its.is_over;
      case Phase::kEnding: return !its.is_over;
      case Phase::kOver: return false;
    }
    return false;
  }
};

using Meetings = std::vector<std::shared_ptr<Meeting>>;

// "process 2 (pid 4711, stopped)"; asks the system for the state.
std::string ProcessName(int process, int64_t pid);

// Why `meeting`, whose deadline has passed, is not complete. `pid_of` maps processes to pids;
// `others` are meetings in which missing ranks wait instead, or did until recently.
std::string WhyLate(const Meeting& meeting, const Meetings& others,
                    const std::function<int64_t(int)>& pid_of);

// Why it cannot complete: a process has ended.
std::string WhyLost(const Meeting& meeting, int process, int64_t pid);

}  // namespace cpd
