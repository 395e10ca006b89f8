// What an exchange waits for, and the words for it.
#include "transport/meeting.h"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "transport/completion_pool.h"

namespace cpd {
namespace {

// The state of a process, as a letter from /proc; 0 if there is no such process.
char StateOf(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  if (!std::getline(file, text)) return 0;
  const size_t end_of_name = text.rfind(')');  // the name may contain anything else
  return end_of_name == std::string::npos || end_of_name + 2 >= text.size() ? 0
                                                                            : text[end_of_name + 2];
}

int ProcessOf(const Meeting& meeting, size_t rank) {
  if (meeting.arrived[rank]) return meeting.process[rank];
  const std::vector<int>* processes = meeting.exchange.processes;
  return processes != nullptr ? (*processes)[rank] : -1;
}

std::string RanksOf(const Meeting& meeting, int process) {
  std::vector<bool> its(meeting.arrived.size());
  for (size_t rank = 0; rank < its.size(); ++rank) its[rank] = ProcessOf(meeting, rank) == process;
  return RankList(its, true);
}

// What another call is, seen from one that waits.
std::string Seen(const Meeting& other, const Meeting& meeting) {
  if (other.signature != meeting.signature) return "another call: " + other.signature;
  // The executions of a program have consecutive numbers, from its fingerprint on.
  constexpr int64_t kMostSkipped = 1 << 16;
  const auto ahead = static_cast<int64_t>(static_cast<uint64_t>(other.key.run_id) -
                                          static_cast<uint64_t>(meeting.key.run_id));
  if (ahead == 0) return "another call of the same kind";
  if (ahead > -kMostSkipped && ahead < kMostSkipped) {
    return "this call in another execution of the program, " + std::to_string(std::abs(ahead)) +
           (ahead > 0 ? " later" : " earlier") + ": it has skipped or repeated a step";
  }
  return "an equal call of another program, whose constants differ, such as a plan of another "
         "batch that the function closes over (pass it as an argument), or that was first called "
         "from another line";
}

// Where a missing rank is instead: in another operation or shape, or in another order.
void AddElsewhere(const Meeting& meeting, const Meetings& others, std::ostringstream* message) {
  for (size_t rank = 0; rank < meeting.arrived.size(); ++rank) {
    if (meeting.arrived[rank]) continue;
    for (auto it = others.rbegin(); it != others.rend(); ++it) {  // the latest first
      const Meeting& other = **it;
      if (rank >= other.arrived.size() || !other.arrived[rank]) continue;
      if (meeting.IsLocal()) {
        *message << " Rank " << rank << " waits in another call: " << other.op << ".";
        continue;
      }
      if (ProcessOf(meeting, rank) != other.process[rank]) continue;
      *message << " Expected rank " << rank << " in: " << meeting.signature << ". Seen: it came to "
               << Seen(other, meeting) << ".";
      break;
    }
  }
}

}  // namespace

bool Meeting::Waits() const {
  return has_exchange &&
         (phase == Phase::kMeeting || phase == Phase::kWaiting || phase == Phase::kEnding);
}

bool Meeting::All(bool Participant::* have) const {
  return std::all_of(participants.begin(), participants.end(),
                     [have](const auto& other) { return other.second.*have; });
}

bool Meeting::Misses(int process) const {
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

std::string ProcessName(int process, int64_t pid) {
  std::string name = "process " + std::to_string(process) + " (pid " + std::to_string(pid);
  switch (StateOf(pid)) {
    case 0:
    case 'Z':
    case 'X': return name + ", ended)";
    case 'T':
    case 't': return name + ", stopped)";
    default: return name + ", alive)";
  }
}

std::string WhyLate(const Meeting& meeting, const Meetings& others,
                    const std::function<int64_t(int)>& pid_of) {
  std::ostringstream message;
  message << meeting.op << ": deadline of " << meeting.deadline.count() << " ms passed: ";
  if (meeting.phase == Phase::kWaiting || meeting.phase == Phase::kEnding) {
    const bool is_ending = meeting.phase == Phase::kEnding;
    message << "all ranks arrived, but of ";
    const char* separator = "";
    int num_seen = 0;
    for (const auto& [process, participant] : meeting.participants) {
      if (is_ending ? participant.is_over : participant.is_ready) {
        ++num_seen;
        continue;
      }
      message << separator << ProcessName(process, pid_of(process))
              << (is_ending ? " the parts of ranks " : " the rows of ranks ")
              << RanksOf(meeting, process) << (is_ending ? " are not done" : " did not come");
      separator = ", of ";
    }
    message
        << ". Expected: " << meeting.participants.size() << " other processes. Seen: " << num_seen
        << ". Check whether it is stopped or the machine is overloaded, or pass a longer deadline.";
    return message.str();
  }
  message << meeting.num_arrived << "/" << meeting.arrived.size() << " ranks arrived, ranks "
          << RankList(meeting.arrived, true) << " wait for missing ranks "
          << RankList(meeting.arrived, false);
  std::map<int, std::vector<bool>> missing;  // by process
  for (size_t rank = 0; rank < meeting.arrived.size(); ++rank) {
    if (meeting.arrived[rank] || meeting.IsLocal()) continue;
    std::vector<bool>& its = missing[ProcessOf(meeting, rank)];
    its.resize(meeting.arrived.size());
    its[rank] = true;
  }
  const char* separator = ": ";
  for (const auto& [process, ranks] : missing) {
    message << separator << RankList(ranks, true) << " of "
            << ProcessName(process, pid_of(process));
    separator = ", ";
  }
  message << ".";
  AddElsewhere(meeting, others, &message);
  message << " Every rank of the axis must make this call the same number of times"
          << (meeting.IsLocal() ? "" : ", in the same programs with equal shapes and plans")
          << "; check whether a missing rank raised its own error, or pass a longer deadline.";
  return message.str();
}

std::string WhyLost(const Meeting& meeting, int process, int64_t pid) {
  std::ostringstream message;
  message << meeting.op << ": expected ranks " << RanksOf(meeting, process) << " of process "
          << process << " (pid " << pid << "), seen: it has ended (" << meeting.num_arrived << "/"
          << meeting.arrived.size()
          << " ranks had arrived). Check its last output. The other processes may end later; the "
             "job can be restarted immediately.";
  return message.str();
}

}  // namespace cpd
