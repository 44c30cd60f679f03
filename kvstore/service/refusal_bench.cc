// What: whether the time of a refusal tells a context that a key may not see from one that is not
//       there. Calls of both kinds in random order over one connection; medians, and the difference
//       of the means with its 95% interval, beside that of two names that are both not there.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <random>

#include "carrel/v1/context.grpc.pb.h"
#include "kvstore/service/access_test_util.h"
#include "kvstore/service/service_test_util.h"

namespace carrel::kvstore {
namespace {

using Call = std::function<grpc::StatusCode(const std::string& context)>;

struct Times {
  std::vector<double> us;
  // Without the slowest and the fastest twentieth: what the machine does besides.
  std::vector<double> Trimmed() const {
    std::vector<double> sorted = us;
    std::sort(sorted.begin(), sorted.end());
    const size_t cut = sorted.size() / 20;
    return {sorted.begin() + static_cast<long>(cut), sorted.end() - static_cast<long>(cut)};
  }
  double Median() const {
    const std::vector<double> sorted = Trimmed();
    return sorted[sorted.size() / 2];
  }
};

std::pair<double, double> MeanAndVarianceOfIt(const std::vector<double>& values) {
  double mean = 0, squares = 0;
  for (const double value : values) mean += value / static_cast<double>(values.size());
  for (const double value : values) squares += (value - mean) * (value - mean);
  const auto n = static_cast<double>(values.size());
  return {mean, squares / (n - 1) / n};
}

void Compare(const char* what, const char* a, const char* b, int calls, const Call& call) {
  Times times[2];
  std::mt19937 random(std::random_device{}());
  for (int i = 0; i < 2 * calls; ++i) {
    const int which = static_cast<int>(random() % 2);
    const auto start = std::chrono::steady_clock::now();
    const grpc::StatusCode code = call(which == 0 ? a : b);
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    if (code != grpc::StatusCode::NOT_FOUND) {
      std::fprintf(stderr, "refusal_bench: %s answered code %d\n", what, code);
      std::exit(1);
    }
    times[which].us.push_back(took.count());
  }
  const auto [mean_a, variance_a] = MeanAndVarianceOfIt(times[0].Trimmed());
  const auto [mean_b, variance_b] = MeanAndVarianceOfIt(times[1].Trimmed());
  std::printf("%-8s %-8s %-8s %8zu %10.2f %10.2f %+10.2f +- %.2f\n", what, a, b,
              times[0].us.size() + times[1].us.size(), times[0].Median(), times[1].Median(),
              mean_a - mean_b, 1.96 * std::sqrt(variance_a + variance_b));
}

void Run(int calls) {
  const std::string folder = std::filesystem::temp_directory_path().string() + "/carrel_refusal_" +
                             std::to_string(getpid());
  std::filesystem::create_directory(folder);
  GuardedServer server(
      folder, Transport::kUnix,
      R"({"name": "k", "sha256": "%k%", "rights": ["list", "open"], "contexts": "mine"})");
  if (const absl::Status status = server.Start(); !status.ok()) {
    std::fprintf(stderr, "refusal_bench: %s\n", status.ToString().c_str());
    std::exit(1);
  }
  const std::shared_ptr<grpc::Channel> channel = server.Channel();
  const auto stub = v1::ContextService::NewStub(channel);
  const Call get = [&](const std::string& name) {
    grpc::ClientContext context;
    context.AddMetadata("authorization", "Bearer k");
    v1::GetRequest request;
    request.set_name(name);
    v1::GetResponse response;
    return stub->Get(&context, request, &response).error_code();
  };
  const Call open = [&](const std::string& name) {
    WireSession session(channel, "k");
    OpenRequest opening = server.mine->Opening();
    opening.context = name;
    session.SendOpen(WireOpen(opening));
    return session.Finish().error_code();
  };
  std::printf("call     a        b           calls   median a   median b  mean a - b (95%%), us\n");
  Compare("get", "theirs", "absent", calls, get);
  Compare("get", "nobody", "absent", calls, get);
  Compare("open", "theirs", "absent", calls, open);
  Compare("open", "nobody", "absent", calls, open);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace carrel::kvstore

int main(int argc, char** argv) {
  carrel::kvstore::Run(argc > 1 ? std::atoi(argv[1]) : 5000);
  return 0;
}
