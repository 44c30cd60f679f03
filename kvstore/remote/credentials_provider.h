// What:   where credentials come from, behind one interface, and when they are asked for again.
// Source: AWS SDKs and Tools reference: environment variables, the shared credentials file, web identity
//         (AssumeRoleWithWebIdentity), instance metadata (IMDSv2); they are asked in that order.
// Errors: NotFound this source has none (names what it looked at); Unauthenticated it has some that do
//         not hold: a profile without a secret, a role that was refused; Unavailable a service that does
//         not answer. No message holds a secret or a token.
// Threads: any.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/remote/http_client.h"
#include "kvstore/remote/signature.h"

namespace carrel::kvstore {

class CredentialsProvider {
 public:
  virtual ~CredentialsProvider() = default;
  // Those that hold now; of temporary ones those that were fetched last, until they are nearly over.
  virtual absl::StatusOr<Credentials> Get() = 0;
  // The server says that these are over: the next Get fetches others, if there is where.
  virtual void Expired(const Credentials& /*credentials*/) {}
};

// The value of an environment variable; empty: not set. Tests have one of their own.
using Environment = std::function<std::string(const char* name)>;
std::string ProcessEnvironment(const char* name);

struct CredentialsOptions {
  std::string profile;  // of the shared file; empty: $AWS_PROFILE, or "default"
  std::string region;   // of STS
  std::string ca_file;  // of STS
  Environment environment = ProcessEnvironment;
};

// One source each. A file is read, and a service asked, at each Get.
std::unique_ptr<CredentialsProvider> GivenCredentials(Credentials credentials);
std::unique_ptr<CredentialsProvider> EnvironmentCredentials(const CredentialsOptions& options);
std::unique_ptr<CredentialsProvider> FileCredentials(const CredentialsOptions& options);
std::unique_ptr<CredentialsProvider> WebIdentityCredentials(const CredentialsOptions& options);
std::unique_ptr<CredentialsProvider> InstanceCredentials(const CredentialsOptions& options);

// Keeps what `source` gave until kRenewBefore before it expires. Where a renewal fails and what there
// is still holds, that is given.
inline constexpr absl::Duration kRenewBefore = absl::Minutes(5);
std::unique_ptr<CredentialsProvider> KeptCredentials(std::unique_ptr<CredentialsProvider> source);
// The first source that has some; it is the one that is asked from then on.
std::unique_ptr<CredentialsProvider> FirstOf(
    std::vector<std::unique_ptr<CredentialsProvider>> sources);

// All of the above. A profile that is named is asked for before the environment.
std::unique_ptr<CredentialsProvider> DefaultCredentials(const CredentialsOptions& options);

}  // namespace carrel::kvstore
