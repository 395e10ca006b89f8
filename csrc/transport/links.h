// Messages between the processes of one host, over one local socket per peer; detects ended peers.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace cpd {

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

  Links(std::vector<Peer> peers, OnMessage on_message, OnEnd on_end);
  void Start();

  // Thread-safe. Does nothing if the process has ended.
  void Send(int process, std::string bytes);

  int64_t pid(int process) const;  // 0: no such peer

 private:
  struct Link {
    explicit Link(Peer peer) : peer(peer) {}
    const Peer peer;
    std::mutex mutex;
    std::deque<std::string> outbox;  // messages that did not fit the socket
    bool has_ended = false;
  };

  Link* Find(int process) const;
  static bool SendNow(Link* link, const std::string& bytes);  // with the link's lock held
  void Flush(Link* link);
  bool Receive(Link* link);  // false: the peer has ended
  void Loop();

  std::vector<std::unique_ptr<Link>> links_;
  const OnMessage on_message_;
  const OnEnd on_end_;
  int wake_fd_;
};

}  // namespace cpd
