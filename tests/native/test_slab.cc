// Processes that allocate channels together, on threads: each has its own slab, and they meet on a
// board, as through a key-value store.
#include <algorithm>
#include <condition_variable>
#include <map>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/slab.h"
#include "native_test.h"

namespace cpd::test_slab {

constexpr int64_t kBytes = 4096;

class Board {
 public:
  Agree Of(int64_t own) {
    return [this, own](const std::string& name, const std::string& message,
                       const std::vector<int64_t>& processes, std::chrono::milliseconds deadline,
                       std::vector<std::string>* messages) -> Status {
      std::unique_lock<std::mutex> lock(mutex_);
      words_[{name, own}] = message;
      changed_.notify_all();
      messages->clear();
      for (const int64_t process : processes) {
        const std::pair<std::string, int64_t> key{name, process};
        if (!changed_.wait_for(lock, deadline, [&] { return words_.count(key) > 0; })) {
          return {StatusCode::kDeadlineExceeded, "process " + std::to_string(process)};
        }
        messages->push_back(words_.at(key));
      }
      return Status::Ok();
    };
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::pair<std::string, int64_t>, std::string> words_;
};

struct Processes {
  explicit Processes(int num) : memory(num, std::vector<char>(kBytes, 0x7f)), slabs(num) {
    for (int p = 0; p < num; ++p) {
      std::vector<char*> bases;
      for (std::vector<char>& bytes : memory) bases.push_back(bytes.data());
      slabs[p].Set(bases, kBytes, std::vector<int64_t>(num, 0), p);
      slabs[p].SetAgree(board.Of(p));
    }
  }

  SlabRequest Ask(const std::string& layout, std::vector<int64_t> processes, int64_t bytes) const {
    return {"op", layout, std::move(processes), bytes, std::chrono::milliseconds(deadline_ms)};
  }
  Status Allocate(int process, const SlabRequest& request, std::vector<char*>* memory) {
    const auto clear = [](char* at, int64_t bytes) {
      std::fill(at, at + bytes, 0);
      return Status::Ok();
    };
    return slabs[process].Allocate(request, clear, memory);
  }

  Board board;
  std::vector<std::vector<char>> memory;
  std::vector<Slab> slabs;
  int deadline_ms = 60'000;
};

template <typename Work>
void Together(int num, Work work) {
  std::vector<std::thread> threads;
  for (int p = 0; p < num; ++p) threads.emplace_back(work, p);
  for (std::thread& thread : threads) thread.join();
}

// Process 0 is in both pairs, the others in one each, so they have allocated differently before all
// of them meet. Every process finds every rank's memory where that rank itself finds it.
void OtherChannelsDoNotMatter() {
  Processes job(3);
  using Memory = std::vector<char*>;
  std::vector<Memory> first(3), second(3), of_all(3);
  Together(3, [&](int p) {
    if (p != 2) CHECK(job.Allocate(p, job.Ask("pair", {1, 0}, 700), &first[p]).ok());
    if (p != 1) CHECK(job.Allocate(p, job.Ask("pair", {0, 2}, 700), &second[p]).ok());
    CHECK(job.Allocate(p, job.Ask("all", {0, 1, 2}, 300), &of_all[p]).ok());
  });
  char* const base[] = {&job.memory[0][0], &job.memory[1][0], &job.memory[2][0]};
  CHECK(first[0] == first[1] && first[0] == Memory({base[1], base[0]}));
  CHECK(second[0] == second[2] && second[0] == Memory({base[0] + 768, base[2]}));
  CHECK(of_all[0] == of_all[1] && of_all[0] == of_all[2]);
  CHECK(of_all[0] == Memory({base[0] + 1536, base[1] + 768, base[2] + 768}));
}

// Memory is used again when all of its processes have freed it, and cleared after that, whatever an
// earlier call left there: signals, also of a rank that gave up, and the half used last.
void FreedMemoryIsUsedWhenAllHaveFreedIt() {
  Processes job(2);
  const SlabRequest ask = job.Ask("layout", {0, 1}, 1000);
  std::vector<std::vector<char*>> a(2), b(2), c(2), d(2);
  Together(2, [&](int p) {
    CHECK(job.Allocate(p, ask, &a[p]).ok());
    std::fill(a[p][p], a[p][p] + 1000, 0x55);
    CHECK(job.Allocate(p, ask, &b[p]).ok());
    job.slabs[p].Free(ask, p == 0 ? a[p] : b[p]);  // each another one
    CHECK(job.Allocate(p, ask, &c[p]).ok());
    if (p == 1) job.slabs[p].Free(ask, a[p]);
    CHECK(job.Allocate(p, ask, &d[p]).ok());
  });
  CHECK(a[0] == a[1] && b[0] == b[1] && c[0] == c[1] && d[0] == d[1]);
  CHECK(c[0] != a[0] && c[0] != b[0] && c[0][0] != a[0][0] && c[0][1] != b[0][1]);
  CHECK(d[0] == a[0]);
  for (int p = 0; p < 2; ++p) {
    CHECK(std::all_of(d[p][p], d[p][p] + 1000, [](char byte) { return byte == 0; }));
  }
}

// All get the error of one, and go on with less. Nothing is lost: the other's memory serves later.
void AllKnowThatOneHasNoMemory() {
  Processes job(2);
  std::vector<char*> alone;
  CHECK(job.Allocate(1, job.Ask("alone", {1}, 2048), &alone).ok());
  std::vector<std::vector<char*>> small(2);
  Together(2, [&](int p) {
    std::vector<char*> memory;
    for (int attempt = 0; attempt < 2; ++attempt) {
      const Status status = job.Allocate(p, job.Ask("large", {0, 1}, 2100), &memory);
      CHECK(status.message.rfind("process 1 needs 2304 more bytes of symmetric memory", 0) == 0);
    }
    CHECK(job.Allocate(p, job.Ask("small", {0, 1}, 1000), &small[p]).ok());
  });
  CHECK(small[0] == small[1]);
  CHECK(small[0][0] == &job.memory[0][2304] && small[0][1] == &job.memory[1][2048]);
}

// A process whose slabs are full gets another, which the others map once. All know that one cannot
// map it, and its place serves the next channel.
void SlabsGrow() {
  Processes job(3);
  std::vector<std::vector<char>> more;
  std::map<std::string, char*> by_handle;
  std::vector<int> num_opened(3);
  bool is_blind = true;
  for (int p = 0; p < 3; ++p) {
    const auto make = [&, p](int64_t bytes, char** memory, std::string* handle) {
      CHECK(p == 1 && bytes == (more.empty() ? kBytes + 256 : kBytes));
      more.emplace_back(bytes, 0x7f);
      *memory = more.back().data();
      *handle = "h" + std::to_string(more.size());
      by_handle[*handle] = *memory;
      return Status::Ok();
    };
    const auto open = [&, p](const std::string& handle, char** memory) {
      if (p == 2 && is_blind) return Status::Invalid("no mapping");
      ++num_opened[p];
      *memory = by_handle.at(handle);
      return Status::Ok();
    };
    job.slabs[p].SetGrowth({make, open});
  }
  std::vector<char*> alone;
  CHECK(job.Allocate(1, job.Ask("alone", {1}, kBytes + 1), &alone).ok());
  CHECK(alone[0] == more[0].data() && alone[0][0] == 0 && num_opened[0] == 0);
  CHECK(job.Allocate(1, job.Ask("first", {1}, kBytes), &alone).ok());  // the first slab has room
  CHECK(alone[0] == job.memory[1].data());
  std::vector<std::vector<char*>> a(3), b(3), c(3);
  Together(3, [&](int p) {
    const SlabRequest ask = job.Ask("all", {0, 1, 2}, 100);
    const Status status = job.Allocate(p, ask, &a[p]);
    CHECK(status.message == "process 2 cannot map new memory of process 1: no mapping");
  });
  is_blind = false;
  Together(3, [&](int p) {
    CHECK(job.Allocate(p, job.Ask("all", {0, 1, 2}, 100), &b[p]).ok());
    CHECK(job.Allocate(p, job.Ask("all", {0, 1, 2}, 100), &c[p]).ok());
    job.slabs[p].Free(job.Ask("all", {0, 1, 2}, 100), b[p]);
    CHECK(job.Allocate(p, job.Ask("all", {0, 1, 2}, 100), &a[p]).ok());
  });
  CHECK(a[0] == b[0] && a[0] != c[0]);
  for (const auto& found : {a, b, c}) CHECK(found[0] == found[1] && found[0] == found[2]);
  CHECK(b[0][0] == &job.memory[0][0] && b[0][1] == more[1].data());
  CHECK((num_opened == std::vector<int>{1, 0, 1}) && more.size() == 2);
}

// A process that gave up may try again; what the late one may have begun to write then stays.
void ALateProcessIsNamed() {
  Processes job(2);
  job.deadline_ms = 20;
  std::vector<char*> mine, theirs;
  const SlabRequest ask = job.Ask("layout", {0, 1}, 100);
  Status status = job.Allocate(0, ask, &mine);
  CHECK(status.code == StatusCode::kDeadlineExceeded && status.message == "process 1");
  status = job.Allocate(1, ask, &theirs);  // reads that nothing is free, and waits for the place
  CHECK(status.code == StatusCode::kDeadlineExceeded && status.message == "process 0");
  CHECK(job.Allocate(0, ask, &mine).ok());
  mine[1][3] = 0x33;
  CHECK(job.Allocate(1, ask, &theirs).ok());
  CHECK(mine == theirs && theirs[1][3] == 0x33);
}

void ProcessesThatHaveNotConnectedAreNamed() {
  Processes job(1);
  std::vector<char*> memory;
  CHECK(job.Allocate(0, job.Ask("", {0, 1}, 8), &memory).message.rfind("process 1 did not", 0) ==
        0);
  Slab slab;
  const Status status = slab.Allocate(job.Ask("", {0}, 8), Clear(), &memory);
  CHECK(status.message.rfind("the processes share no memory yet", 0) == 0);
}

const Register kTests("test_slab", [](const Numbers&) {
  OtherChannelsDoNotMatter();
  FreedMemoryIsUsedWhenAllHaveFreedIt();
  AllKnowThatOneHasNoMemory();
  SlabsGrow();
  ALateProcessIsNamed();
  ProcessesThatHaveNotConnectedAreNamed();
});

}  // namespace cpd::test_slab
