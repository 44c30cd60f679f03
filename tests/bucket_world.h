// What: a bucket for tests of the program: of this process, or of a real server.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "kvstore/remote/object_server.h"
#include "kvstore/remote/remote_test_util.h"
#include "tests/cli_world.h"

namespace carrel::cli {

inline constexpr char kBucketUri[] = "s3://carrel-test/team/a";

// How the program finds the bucket, and what it presents.
inline std::vector<std::pair<std::string, std::string>> BucketEnvironment(
    const std::string& endpoint, const std::string& secret = "test-secret-0123456789") {
  return {{"AWS_ENDPOINT_URL_S3", endpoint},
          {"AWS_ACCESS_KEY_ID", "test-access"},
          {"AWS_SECRET_ACCESS_KEY", secret},
          {"AWS_SESSION_TOKEN", ""},
          {"AWS_PROFILE", ""},
          {"AWS_REGION", "us-east-1"}};
}

// A replica's flags, but for where its cache is.
inline Args ReplicaOf(const std::string& cache, const std::string& cache_bytes = "1GB") {
  return {"--remote", kBucketUri, "--cache", cache, "--cache-bytes", cache_bytes};
}

// SeaweedFS with the bucket made; null: the machine has none.
inline std::unique_ptr<kvstore::ObjectServer> StartSeaweed(const std::string& folder) {
  auto server = kvstore::ObjectServer::Start(kvstore::ObjectServer::Kind::kSeaweed, folder);
  if (server == nullptr) return nullptr;
  const auto client = kvstore::TestClient(server->endpoint());
  for (int i = 0; i < 50 && !client->Put("", "").ok(); ++i) absl::SleepFor(absl::Milliseconds(200));
  return server;
}

}  // namespace carrel::cli
