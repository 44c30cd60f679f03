#include "library/server_choice.h"

#include <algorithm>

#include "common/routing.h"
#include "common/steady_time.h"

namespace carrel::library {

std::vector<std::string> ServerChoice::For(const std::string& context) const {
  std::vector<std::string> order;
  for (const size_t place : PlacesFor(context, servers_)) order.push_back(servers_[place]);
  absl::MutexLock lock(&mu_);
  const absl::Time now = SteadyNow();
  std::stable_partition(order.begin(), order.end(), [&](const std::string& server) {
    const auto failed = failed_.find(server);
    return failed == failed_.end() || now - failed->second > kAvoid;
  });
  return order;
}

void ServerChoice::Failed(const std::string& server) {
  absl::MutexLock lock(&mu_);
  failed_[server] = SteadyNow();
}

}  // namespace carrel::library
