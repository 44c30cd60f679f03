// What: what tests of this folder share: a client of a server, quick to try again. Tests only.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "kvstore/remote/fake_s3.h"
#include "kvstore/remote/s3_client.h"

namespace carrel::kvstore {

inline const Credentials kTestCredentials{"test-access", "test-secret-0123456789", ""};

inline S3Config TestConfig(const std::string& endpoint) {
  return {.bucket = FakeS3::kBucket,
          .endpoint = endpoint,
          .retry = {.first = absl::Milliseconds(2),
                    .most = absl::Milliseconds(50),
                    .deadline = absl::Seconds(30)}};
}

inline std::unique_ptr<CredentialsProvider> GivenCredentials(const Credentials& credentials) {
  return std::make_unique<CredentialsProvider>(
      std::vector<CredentialsProvider::Source>{{[credentials] { return credentials; }}});
}

inline std::unique_ptr<S3Client> TestClient(const std::string& endpoint,
                                            const Credentials& credentials = kTestCredentials) {
  auto client = S3Client::Create(TestConfig(endpoint), GivenCredentials(credentials));
  CARREL_CHECK(client.ok());
  return *std::move(client);
}

}  // namespace carrel::kvstore
