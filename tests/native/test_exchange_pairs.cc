// Exchanges in two calls: which of them go on beside their program, in which order streams wait.
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "gpu_schedule/exchange_pairs.h"
#include "native_test.h"

namespace cpd::test_exchange_pairs {

// Writes down what happens. Streams and events are texts and numbers.
class Recorder final : public StreamOrder {
 public:
  void* MakeEvent() override {
    events.push_back(static_cast<int>(events.size()));
    return can_make ? reinterpret_cast<void*>(events.size()) : nullptr;
  }
  bool Record(void* event, void* stream) override {
    Add("record ", event, stream);
    return can_record;
  }
  bool Wait(void* stream, void* event) override {
    Add("wait ", event, stream);
    return true;
  }
  bool IsOver(void*) override { return is_over; }

  std::string Take() {
    std::string taken;
    std::swap(taken, log);
    return taken;
  }

  std::vector<int> events;
  std::string log;
  bool can_make = true, can_record = true, is_over = false;

 private:
  void Add(const char* what, void* event, void* stream) {
    log += what + std::to_string(reinterpret_cast<intptr_t>(event)) + " on " +
           static_cast<const char*>(stream) + "; ";
  }
};

char program[] = "program", own[] = "own";

ExchangePairs::Addresses Arrays(int64_t first) {
  ExchangePairs::Addresses arrays;
  for (int64_t i = 0; i < 3; ++i) arrays.push_back(reinterpret_cast<const void*>(first + i));
  return arrays;
}

bool Start(ExchangePairs* pairs, const ExchangePairs::Addresses& arrays, Recorder* order) {
  return pairs->Start(arrays, program, own, [&] {
    order->log += "launch; ";
    return true;
  });
}

// What a program does with one pair, from its announcement.
void RunOnce(ExchangePairs* pairs, Recorder* order, int64_t address) {
  const auto arrays = Arrays(address);
  CHECK(pairs->AnnounceStart(arrays));
  pairs->AnnounceDone(arrays);
  CHECK(pairs->IsPair(arrays));
  CHECK(Start(pairs, arrays, order));
  CHECK(pairs->Done(arrays, program));
}

void TheExchangeWaitsForEarlierWorkAndTheProgramForTheExchange() {
  Recorder order;
  ExchangePairs pairs(&order);
  const std::string once =
      "record 1 on program; wait 1 on own; launch; record 2 on own; wait 2 on program; ";
  for (int i = 0; i < 3; ++i) {
    RunOnce(&pairs, &order, 16);
    CHECK(order.Take() == once);
  }
  CHECK(order.events.size() == 2);
  CHECK(pairs.num_started() == 3);
}

void OnlyAStartWithItsDoneIsAPair() {
  Recorder order;
  ExchangePairs pairs(&order);
  const auto arrays = Arrays(16);
  CHECK(!pairs.IsPair(arrays));
  CHECK(pairs.AnnounceStart(arrays));
  CHECK(!pairs.IsPair(arrays));
  pairs.AnnounceDone(Arrays(17));  // a copy of one array
  CHECK(!pairs.IsPair(arrays));
  auto longer = arrays;
  longer.push_back(nullptr);
  pairs.AnnounceDone(longer);
  CHECK(!pairs.IsPair(arrays));
  pairs.AnnounceDone(arrays);
  CHECK(pairs.IsPair(arrays));
  pairs.AnnounceDone(arrays);  // of two, no one knows which
  CHECK(!pairs.IsPair(arrays));
  CHECK(pairs.Done(arrays, program));  // the exchange was whole
  CHECK(order.Take().empty());
}

void APairsPlacesMayServeAnotherPairOfTheProgram() {
  Recorder order;
  ExchangePairs pairs(&order);
  const auto arrays = Arrays(16);
  for (int run = 0; run < 2; ++run) {
    for (int i = 0; i < 2; ++i) {
      CHECK(pairs.AnnounceStart(arrays));
      pairs.AnnounceDone(arrays);
    }
    for (int i = 0; i < 2; ++i) {
      CHECK(pairs.IsPair(arrays));
      CHECK(Start(&pairs, arrays, &order));
      CHECK(pairs.Done(arrays, program));
    }
  }
  // In the next program, the second start at these places has no done.
  CHECK(pairs.AnnounceStart(arrays));
  pairs.AnnounceDone(arrays);
  CHECK(pairs.AnnounceStart(arrays));
  CHECK(!pairs.IsPair(arrays));
}

void TwoPairsInFlightEndInAnyOrder() {
  Recorder order;
  ExchangePairs pairs(&order);
  for (const int64_t address : {16, 32}) {
    CHECK(pairs.AnnounceStart(Arrays(address)));
    pairs.AnnounceDone(Arrays(address));
  }
  for (const int64_t address : {16, 32}) CHECK(Start(&pairs, Arrays(address), &order));
  order.Take();
  CHECK(pairs.Done(Arrays(32), program));
  CHECK(pairs.Done(Arrays(16), program));
  CHECK(order.Take() == "wait 4 on program; wait 2 on program; ");
  CHECK(pairs.Done(Arrays(16), program));  // nothing is left to wait for
  CHECK(order.Take().empty());
}

void AProgramThatEndedBetweenTheCallsIsWaitedFor() {
  Recorder order;
  ExchangePairs pairs(&order);
  CHECK(pairs.AnnounceStart(Arrays(16)));
  pairs.AnnounceDone(Arrays(16));
  CHECK(Start(&pairs, Arrays(16), &order));
  order.Take();
  CHECK(pairs.AwaitEnded(program));  // by any call of the package
  CHECK(order.Take() == "wait 2 on program; ");
  order.is_over = true;
  CHECK(pairs.AwaitEnded(program));
  order.is_over = false;
  CHECK(pairs.AwaitEnded(program));
  CHECK(order.Take().empty());
}

void AFailedLaunchIsWaitedFor() {
  Recorder order;
  ExchangePairs pairs(&order);
  CHECK(pairs.AnnounceStart(Arrays(16)));
  pairs.AnnounceDone(Arrays(16));
  CHECK(!pairs.Start(Arrays(16), program, own, [] { return false; }));
  CHECK(order.Take() == "record 1 on program; wait 1 on own; record 2 on own; wait 2 on program; ");
  CHECK(pairs.num_started() == 0);
  order.can_record = false;
  CHECK(!Start(&pairs, Arrays(16), &order));
  CHECK(order.Take() == "record 1 on program; ");  // and nothing has been launched
  order.can_make = false;
  CHECK(!pairs.AnnounceStart(Arrays(32)));
}

void PlacesOfEarlierProgramsAreForgotten() {
  Recorder order;
  ExchangePairs pairs(&order);
  CHECK(pairs.AnnounceStart(Arrays(8)));
  pairs.AnnounceDone(Arrays(8));
  const auto announce = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) CHECK(pairs.AnnounceStart(Arrays(16 * i)));
  };
  announce(1, 16'000);
  CHECK(Start(&pairs, Arrays(8), &order));  // it stays
  announce(16'000, 20'000);
  CHECK(order.events.size() < 40'000);
  order.Take();
  CHECK(pairs.Done(Arrays(8), program));
  CHECK(order.Take() == "wait 2 on program; ");
}

const Register kTests("test_exchange_pairs", [](const Numbers&) {
  TheExchangeWaitsForEarlierWorkAndTheProgramForTheExchange();
  OnlyAStartWithItsDoneIsAPair();
  APairsPlacesMayServeAnotherPairOfTheProgram();
  TwoPairsInFlightEndInAnyOrder();
  AProgramThatEndedBetweenTheCallsIsWaitedFor();
  AFailedLaunchIsWaitedFor();
  PlacesOfEarlierProgramsAreForgotten();
});

}  // namespace cpd::test_exchange_pairs
