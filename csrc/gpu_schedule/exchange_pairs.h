// Exchanges in two calls on one device: the first starts the exchange on a stream of its own, the
// second makes the program's stream wait for it. Between them the program computes.
//
// Between the calls, the exchange uses memory of the program. That is safe only if the program
// keeps this memory until the second call: every array that the exchange uses is a result of the
// first call and an operand of the second. Compilers may drop the second call, or insert a copy
// between them. Therefore all calls of a program are announced, with the addresses of these arrays,
// before the program runs. An exchange whose second call has not been announced with the same
// addresses is complete at the end of its first call.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

namespace cpd {

// Streams and events of a device, or of a test. The host never waits.
class StreamOrder {
 public:
  virtual ~StreamOrder() = default;

  // A new event; nullptr if there is none.
  virtual void* MakeEvent() = 0;
  virtual bool Record(void* event, void* stream) = 0;
  virtual bool Wait(void* stream, void* event) = 0;
  virtual bool IsOver(void* event) = 0;
};

class ExchangePairs {
 public:
  using Addresses = std::vector<const void*>;  // of the arrays, in order

  explicit ExchangePairs(StreamOrder* order) : order_(order) {}

  // Before a program runs. `stream` is the program's: it waits for exchanges of programs that ended
  // between their two calls.
  bool AnnounceStart(const Addresses& arrays, void* stream);
  void AnnounceDone(const Addresses& arrays);

  // Whether the exchange may go on after its first call.
  bool IsPair(const Addresses& arrays);

  // The first call of a pair. `launch` enqueues the exchange on `own`, after the earlier work of
  // `stream`. False if a step failed; then `stream` waits for what has been launched.
  bool Start(const Addresses& arrays, void* stream, void* own, const std::function<bool()>& launch);

  // The second call. Nothing is left to wait for if the exchange is complete.
  bool Done(const Addresses& arrays, void* stream);

  // The number of exchanges that went on after their first call.
  int64_t num_started();

 private:
  struct Pair {
    int64_t num_starts = 0, num_dones = 0;  // announced for the next run
    bool has_run = false;                   // since they were announced
    bool is_in_flight = false;              // between its two calls
    void* begin = nullptr;                  // the earlier work of the program's stream
    void* end = nullptr;                    // the exchange
  };

  bool WaitForEnded(void* stream);
  void ForgetIdle();

  StreamOrder* const order_;
  std::mutex mutex_;
  std::map<Addresses, Pair> pairs_;
  std::vector<void*> unused_events_;
  int64_t num_in_flight_ = 0, num_started_ = 0;
};

}  // namespace cpd
