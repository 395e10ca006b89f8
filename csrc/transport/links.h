// Messages between the processes of one host: one local socket to each, and who has ended.
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

// A process at the other end of a socket that keeps the borders of messages (SOCK_SEQPACKET).
struct Peer {
  int process;
  int64_t pid;
  int socket_fd;
  int pid_fd;  // -1: only the end of the socket tells the end of the process
};

// Sends without waiting and receives on a thread of its own. Messages of one peer come in the order
// in which they were sent; then, once, that it has ended. Never destroyed, as that thread stays.
class Links {
 public:
  static constexpr size_t kMaxMessageBytes = 8192;

  using OnMessage = std::function<void(int process, const std::string& bytes)>;
  using OnEnd = std::function<void(int process)>;

  Links(std::vector<Peer> peers, OnMessage on_message, OnEnd on_end);
  void Start();

  // From any thread. To a process that has ended: nothing.
  void Send(int process, std::string bytes);

  int64_t pid(int process) const;  // 0: no such peer

 private:
  struct Link {
    explicit Link(Peer peer) : peer(peer) {}
    const Peer peer;
    std::mutex mutex;
    std::deque<std::string> outbox;  // what the socket had no room for
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
