// What:   where credentials come from, and when they are asked for again.
// Source: AWS SDKs and Tools reference: environment variables, the shared credentials file, web identity
//         (AssumeRoleWithWebIdentity), instance metadata (IMDSv2); they are asked in that order.
// Errors: NotFound this source has none (names what it looked at); Unauthenticated it has some that do
//         not hold: a profile without a secret, a role that was refused; Unavailable a service that does
//         not answer. No message holds a secret or a token.
// Ownership: a provider keeps its sources.
// Threads: any.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "kvstore/remote/http_client.h"
#include "kvstore/remote/signature.h"

namespace carrel::kvstore {

// The value of an environment variable; empty: not set. Tests have one of their own.
using Environment = std::function<std::string(const char* name)>;
std::string ProcessEnvironment(const char* name);

struct CredentialsOptions {
  std::string profile;  // of the shared file; empty: $AWS_PROFILE, or "default"
  std::string region;   // of STS
  std::string ca_file;  // of STS
  Environment environment = ProcessEnvironment;
};

// One place where they may be: a file is read, and a service asked, at each call.
using CredentialsSource = std::function<absl::StatusOr<Credentials>()>;
CredentialsSource EnvironmentCredentials(const CredentialsOptions& options);
CredentialsSource FileCredentials(const CredentialsOptions& options);
CredentialsSource WebIdentityCredentials(const CredentialsOptions& options);
CredentialsSource InstanceCredentials(const CredentialsOptions& options);

// How long before they expire others are fetched. Where that fails, what there is serves as long as it holds.
inline constexpr absl::Duration kRenewBefore = absl::Minutes(5);

class CredentialsProvider {
 public:
  struct Source {
    CredentialsSource get;
    bool keep = false;  // what it gave is given again until it is nearly over
  };
  // The first source that has some is the one that is asked from then on.
  explicit CredentialsProvider(std::vector<Source> sources) : sources_(std::move(sources)) {}
  absl::StatusOr<Credentials> Get();
  // The server says that these are over: the next Get fetches others, if there is where.
  void Expired(const Credentials& credentials);

 private:
  absl::Mutex mu_;
  const std::vector<Source> sources_;
  const Source* chosen_ ABSL_GUARDED_BY(mu_) = nullptr;
  std::optional<Credentials> kept_ ABSL_GUARDED_BY(mu_);  // of chosen_
};

// All of the above. A profile that is named is asked for before the environment.
std::unique_ptr<CredentialsProvider> DefaultCredentials(const CredentialsOptions& options);

}  // namespace carrel::kvstore
