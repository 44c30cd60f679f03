// What:   contexts that are to lie here before a server says that it is ready: brought at once, together, and kept
//         until the last of them is here. Afterwards they are contexts like others, and may go.
// Edge:   one that the bucket does not have is warned of and not waited for. All else is tried again until it comes: a
//         bucket that does not answer, or less room than all of them need, leaves a server that is not ready.
// Threads: any; `ready` is told on a thread of this class or of the residence.
// Ownership: the residence outlives it.
//
//   Warming warming(residence, {"report"}, [&] { server->SetReady(); });
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "kvstore/replica/residence.h"

namespace carrel::kvstore {

class Warming {
 public:
  // ready: told once; may be null. try_every: what failed.
  Warming(Residence& residence, const std::vector<std::string>& names, std::function<void()> ready,
          absl::Duration try_every = absl::Seconds(1));
  ~Warming();

  bool ready() const;

 private:
  struct Shared;
  void Run();
  void Ask(size_t i, const std::string& name);
  void LetGo();

  Residence& residence_;
  const std::function<void()> tell_;
  const absl::Duration try_every_;
  const std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

}  // namespace carrel::kvstore
