// What:   the listening sockets of a server, and the loop that accepts connections on them. It is
//         ours and not gRPC's, whose listener stops for good when a process has no descriptor left
//         (CVE-2023-4785 in 1.51; decision 038), and so that connections are bounded and counted.
// Errors: of Bind: those of PrepareToListen; what the system says of an address.
// Threads: Bind, Start and Stop by one thread; counters from any. `take` runs on the loop's thread.
//
// Invariants
//   1. While there is no descriptor for a connection, it is taken on a reserved one and closed: its
//      client learns at once, and the loop never ends before Stop.
//   2. Descriptor numbers of Unix sockets are reused as late as possible: a late lookup of the peer by
//      number must not return another connection's peer.
//   3. At most max_connections that were accepted are open; one more is closed at once.
//   4. A connection is handed over when its client has said something, as every client of HTTP/2 and
//      TLS does first: one that says nothing costs a descriptor, none of gRPC's memory (13 KiB, and a
//      page of heap for good), and is closed after `silence`.
#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kvstore/service/listen_address.h"

namespace carrel::kvstore {

struct Connection {
  size_t address = 0;  // index into addresses()
  int listening_fd = -1;
  int fd = -1;  // does not block, closes on exec; owned by its taker
};

class Listener {
 public:
  struct Counters {
    int64_t open = 0;  // now
    int64_t accepted = 0;
    int64_t silent = 0;   // closed, as their clients said nothing
    int64_t refused = 0;  // closed at once: max_connections, or no descriptor
  };

  // Binds and listens. TCP: every address that the host's name has; port 0 becomes a free one.
  // max_connections: at least 1. socket_mode: of Unix sockets' files, less the umask.
  static absl::StatusOr<std::unique_ptr<Listener>> Bind(const std::vector<ListenAddress>& addresses,
                                                        int64_t max_connections,
                                                        uint32_t socket_mode,
                                                        absl::Duration silence = absl::Seconds(10));
  ~Listener();  // as Stop

  // With the ports that were bound.
  const std::vector<ListenAddress>& addresses() const { return addresses_; }

  void Start(std::function<void(const Connection&)> take);
  // Closes the listening sockets and removes the files of Unix sockets. Connections stay.
  void Stop();

  // Connects to each socket and waits until the loop has seen that: DeadlineExceeded or Unavailable
  // if it does not, or the system's word. Any thread; before Stop.
  absl::Status Probe(absl::Duration limit) const;

  Counters counters() const;

 private:
  struct Socket {
    size_t address = 0;
    int fd = -1;
  };

  Listener(std::vector<ListenAddress> addresses, int64_t max_connections, absl::Duration silence);
  absl::Status BindUnix(size_t address, uint32_t socket_mode);
  absl::Status BindTcp(size_t address);
  void Run();
  // Waits for what comes, and takes it; false: the loop ends.
  bool Look(std::vector<pollfd>& wait);
  // False: no connection waits.
  bool AcceptOne(const Socket& socket);
  void AwaitWord(const Connection& connection);
  void HandOverThoseThatSpoke();
  void HandOver(const Connection& connection);
  // Returns how long the loop may wait for the next.
  int CloseThoseThatAreSilent();
  void Close(int fd);  // a connection that was not taken
  int Renumbered(int fd);
  void RefuseOneOnReserve(const Socket& socket);
  void Refuse(int fd, absl::string_view why);
  bool HasRoom();
  int64_t seen() const { return accepted_.load() + refused_.load(); }
  void Sweep() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  std::vector<ListenAddress> addresses_;
  const int64_t max_connections_;
  const int64_t silence_ms_;
  std::vector<Socket> sockets_;
  int stop_fd_ = -1;     // readable: the loop ends
  int reserve_fd_ = -1;  // of the loop's thread
  std::function<void(const Connection&)> take_;
  std::thread loop_;
  int next_number_ = 0;  // of the loop's thread
  std::atomic<int64_t> accepted_{0}, refused_{0}, silent_{0};

  // Connections whose clients have not spoken, and since when, the first of them first. A number that
  // is there twice is the later one's. Of the loop's thread.
  struct Unspoken {
    Connection connection;
    int64_t since_ms = 0;
  };
  int unspoken_fd_ = -1;  // epoll: of those
  absl::flat_hash_map<int, Unspoken> unspoken_;
  std::deque<std::pair<int, int64_t>> unspoken_since_ms_;

  int64_t refused_told_ms_ = 0, swept_ms_ = 0;  // of the loop's thread

  mutable absl::Mutex mu_;
  // Descriptor -> inode of each connection. Who took it closes it without a
  // word, and the number may then stand for something else: with another inode.
  mutable absl::flat_hash_map<int, uint64_t> open_ ABSL_GUARDED_BY(mu_);
};

}  // namespace carrel::kvstore
