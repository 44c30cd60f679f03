#include "kvstore/remote/credentials_provider.h"

#include <cstdlib>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "common/file.h"
#include "common/shown.h"
#include "common/status.h"

namespace carrel::kvstore {
namespace {

constexpr int64_t kMostCredentialsFile = int64_t{1} << 20;

}  // namespace

std::string ProcessEnvironment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

CredentialsSource EnvironmentCredentials(const CredentialsOptions& options) {
  return [environment = options.environment]() -> absl::StatusOr<Credentials> {
    const Credentials found{.access_key = environment("AWS_ACCESS_KEY_ID"),
                            .secret_key = environment("AWS_SECRET_ACCESS_KEY"),
                            .session_token = environment("AWS_SESSION_TOKEN")};
    if (found.access_key.empty() && found.secret_key.empty()) {
      return absl::NotFoundError("AWS_ACCESS_KEY_ID is not set");
    }
    if (!found.access_key.empty() && !found.secret_key.empty()) return found;
    return absl::UnauthenticatedError(
        "of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY one is not set");
  };
}

// Sections in brackets, and in them lines NAME = VALUE.
CredentialsSource FileCredentials(const CredentialsOptions& options) {
  const Environment& environment = options.environment;
  std::string profile = options.profile, path = environment("AWS_SHARED_CREDENTIALS_FILE");
  if (profile.empty()) profile = environment("AWS_PROFILE");
  if (profile.empty()) profile = "default";
  if (path.empty()) path = environment("HOME") + "/.aws/credentials";
  return [profile, path]() -> absl::StatusOr<Credentials> {
    ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMostCredentialsFile));
    Credentials found;
    bool here = false, seen = false;
    for (absl::string_view line : absl::StrSplit(text, '\n')) {
      line = absl::StripAsciiWhitespace(line);
      if (line.empty() || line[0] == '#' || line[0] == ';') continue;
      if (line[0] == '[') {
        const absl::string_view name = line.substr(1, line.find(']') - 1);
        here = absl::StripAsciiWhitespace(name) == profile;
        seen |= here;
      }
      const size_t equals = line.find('=');
      if (!here || equals == absl::string_view::npos) continue;
      const absl::string_view name = absl::StripAsciiWhitespace(line.substr(0, equals));
      const std::string value(absl::StripAsciiWhitespace(line.substr(equals + 1)));
      if (name == "aws_access_key_id") found.access_key = value;
      if (name == "aws_secret_access_key") found.secret_key = value;
      if (name == "aws_session_token") found.session_token = value;
    }
    const std::string where = absl::StrCat(path, " [", Shown(profile), "]");
    if (!seen) return absl::NotFoundError(where + ": there is no such profile");
    if (!found.access_key.empty() && !found.secret_key.empty()) return found;
    return absl::UnauthenticatedError(where +
                                      " has no aws_access_key_id or no aws_secret_access_key");
  };
}

absl::StatusOr<Credentials> CredentialsProvider::Get() {
  absl::MutexLock lock(&mu_);
  const absl::Time now = absl::Now();
  if (kept_.has_value() && now < kept_->expires - kRenewBefore) return *kept_;
  std::vector<std::string> looked;
  for (const Source& source : sources_) {
    if (chosen_ != nullptr && chosen_ != &source) continue;
    absl::StatusOr<Credentials> found = source.get();
    if (found.ok()) {
      chosen_ = &source;
      if (source.keep) kept_ = *found;
    } else if (kept_.has_value() && now < kept_->expires) {
      return *kept_;
    }
    if (chosen_ != nullptr || !absl::IsNotFound(found.status())) return found;
    looked.emplace_back(found.status().message());
  }
  return absl::UnauthenticatedError(
      absl::StrCat("no credentials for the bucket: ", absl::StrJoin(looked, "; ")));
}

void CredentialsProvider::Expired(const Credentials& credentials) {
  absl::MutexLock lock(&mu_);
  if (kept_.has_value() && kept_->access_key == credentials.access_key &&
      kept_->session_token == credentials.session_token) {
    kept_.reset();
  }
}

std::unique_ptr<CredentialsProvider> DefaultCredentials(const CredentialsOptions& options) {
  using Sources = std::vector<CredentialsProvider::Source>;
  // A file may be written anew by whoever renews what stands in it.
  if (!options.profile.empty()) {
    return std::make_unique<CredentialsProvider>(Sources{{FileCredentials(options)}});
  }
  return std::make_unique<CredentialsProvider>(
      Sources{{EnvironmentCredentials(options)},
              {WebIdentityCredentials(options), /*keep=*/true},
              {FileCredentials(options)},
              {InstanceCredentials(options), /*keep=*/true}});
}

}  // namespace carrel::kvstore
