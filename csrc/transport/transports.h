// The transports between CPU devices: of one process, and of several processes of one host.
#pragma once

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace cpd {

// ---- Messages between the processes of one host, over one local socket per peer; detects ended
// peers.

// A process at the other end of a socket that preserves message boundaries (SOCK_SEQPACKET).
struct Peer {
  int process;
  int64_t pid;
  int socket_fd;
  int pid_fd;  // -1: only the end of the socket reveals the end of the process
};

// Sends without blocking; receives on its own thread. Delivers the messages of a peer in order,
// then reports its end once. Never destroyed, because that thread never ends.
class Links {
 public:
  static constexpr size_t kMaxMessageBytes = 8192;

  using OnMessage = std::function<void(int process, const std::string& bytes)>;
  using OnEnd = std::function<void(int process)>;

  Links(std::vector<Peer> peers, OnMessage on_message, OnEnd on_end)
      : on_message_(std::move(on_message)),
        on_end_(std::move(on_end)),
        wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    for (const Peer& peer : peers) links_.push_back(std::make_unique<Link>(peer));
  }

  void Start() {
    std::thread([this] {
      pthread_setname_np(pthread_self(), "cpd-links");
      Loop();
    }).detach();
  }

  // Thread-safe. Does nothing if the process has ended.
  void Send(int process, std::string bytes) {
    Link* link = Find(process);
    if (link == nullptr) return;
    std::lock_guard<std::mutex> lock(link->mutex);
    if (link->has_ended) return;
    if (link->outbox.empty() && SendNow(link, bytes)) return;
    link->outbox.push_back(std::move(bytes));
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof(one));
  }

  // 0: no such peer
  int64_t pid(int process) const {
    const Link* link = Find(process);
    return link ? link->peer.pid : 0;
  }

 private:
  using Clock = std::chrono::steady_clock;
  // The next message of an exchange comes within about this time; waking up would take as long.
  static constexpr std::chrono::microseconds kSpinTime{50};

  struct Link {
    explicit Link(Peer peer) : peer(peer) {}
    const Peer peer;
    std::mutex mutex;
    std::deque<std::string> outbox;  // messages that did not fit the socket
    bool has_ended = false;
  };

  Link* Find(int process) const {
    for (const auto& link : links_) {
      if (link->peer.process == process) return link.get();
    }
    return nullptr;
  }

  // Called with the lock of the link held.
  // Returns false if the socket is full now. Drops what cannot be sent at all: the receiving side
  // of the link detects that the peer has ended.
  static bool SendNow(Link* link, const std::string& bytes) {
    while (true) {
      if (send(link->peer.socket_fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) >=
          0) {
        return true;
      }
      if (errno == EINTR) continue;
      return errno != EAGAIN && errno != EWOULDBLOCK && errno != ENOBUFS && errno != ENOMEM;
    }
  }

  void Flush(Link* link) {
    std::lock_guard<std::mutex> lock(link->mutex);
    while (!link->outbox.empty() && SendNow(link, link->outbox.front())) link->outbox.pop_front();
  }

  // Returns false if the peer has ended.
  bool Receive(Link* link) {
    std::array<char, kMaxMessageBytes> bytes;
    while (true) {
      const ssize_t n = recv(link->peer.socket_fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (n > 0) {
        on_message_(link->peer.process, std::string(bytes.data(), n));
        continue;
      }
      if (n == 0) return false;
      // A peer that ends with unread messages resets the connection; its own messages can still be
      // read.
      if (errno == EINTR || errno == ECONNRESET) continue;
      return errno == EAGAIN || errno == EWOULDBLOCK;
    }
  }

  void Loop() {
    std::vector<pollfd> polled;
    std::vector<Link*> of_poll;
    Clock::time_point last_message = Clock::now();
    while (true) {
      polled.assign(1, {wake_fd_, POLLIN, 0});
      of_poll.assign(1, nullptr);
      for (const auto& link : links_) {
        std::lock_guard<std::mutex> lock(link->mutex);
        if (link->has_ended) continue;
        const short events = static_cast<short>(link->outbox.empty() ? POLLIN : POLLIN | POLLOUT);
        polled.push_back({link->peer.socket_fd, events, 0});
        of_poll.push_back(link.get());
        polled.push_back({link->peer.pid_fd, POLLIN, 0});  // poll ignores negative descriptors
        of_poll.push_back(link.get());
      }
      const bool spins = Clock::now() - last_message < kSpinTime;
      const int num_ready = poll(polled.data(), polled.size(), spins ? 0 : -1);
      if (num_ready <= 0) {
        if (spins) sched_yield();
        continue;
      }
      for (size_t i = 0; i < polled.size(); ++i) {
        if (polled[i].revents == 0) continue;
        Link* link = of_poll[i];
        if (link == nullptr) {
          uint64_t count;
          [[maybe_unused]] const ssize_t n = read(wake_fd_, &count, sizeof(count));
          continue;
        }
        if (link->has_ended) continue;  // only this thread changes it
        Flush(link);
        last_message = Clock::now();
        const bool is_pid = polled[i].fd == link->peer.pid_fd;
        if (Receive(link) && !is_pid) continue;
        {
          std::lock_guard<std::mutex> lock(link->mutex);
          link->has_ended = true;
          link->outbox.clear();
        }
        on_end_(link->peer.process);
      }
    }
  }

  std::vector<std::unique_ptr<Link>> links_;
  const OnMessage on_message_;
  const OnEnd on_end_;
  int wake_fd_;
};

// Memory that `process` writes and this process reads. The own segment is the reverse.
struct SharedSegment {
  int process;
  int fd;  // of the own segment only
  char* base;
  int64_t num_bytes;
};

// The transport of this process. Never destroyed: detached threads wait on its condition variables,
// and destroying one of those hangs exit().
Transport& InProcessTransport();

// The same transport, once it reaches other processes; nullptr before `StartSharedMemory`.
Transport* SharedMemoryTransport();
void StartSharedMemory(SharedSegment own, std::vector<SharedSegment> others,
                       std::vector<Peer> peers);

// Another one, as of another process. Never destroyed either.
Transport& NewTransport(SharedSegment own, std::vector<SharedSegment> others,
                        std::vector<Peer> peers);

}  // namespace cpd
