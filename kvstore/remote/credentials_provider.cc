#include "kvstore/remote/credentials_provider.h"

#include <cstdlib>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "common/file.h"
#include "common/shown.h"
#include "common/status.h"

namespace carrel::kvstore {
namespace {

constexpr int64_t kMostCredentialsFile = int64_t{1} << 20;

class Given final : public CredentialsProvider {
 public:
  explicit Given(Credentials credentials) : credentials_(std::move(credentials)) {}
  absl::StatusOr<Credentials> Get() override { return credentials_; }

 private:
  const Credentials credentials_;
};

class FromEnvironment final : public CredentialsProvider {
 public:
  explicit FromEnvironment(Environment environment) : environment_(std::move(environment)) {}
  absl::StatusOr<Credentials> Get() override {
    Credentials found;
    found.access_key = environment_("AWS_ACCESS_KEY_ID");
    found.secret_key = environment_("AWS_SECRET_ACCESS_KEY");
    found.session_token = environment_("AWS_SESSION_TOKEN");
    if (found.access_key.empty() && found.secret_key.empty()) {
      return absl::NotFoundError("AWS_ACCESS_KEY_ID is not set");
    }
    if (found.access_key.empty() || found.secret_key.empty()) {
      return absl::UnauthenticatedError(
          "of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY one is not set");
    }
    return found;
  }

 private:
  const Environment environment_;
};

// Sections in brackets, and in them lines NAME = VALUE.
class FromFile final : public CredentialsProvider {
 public:
  explicit FromFile(const CredentialsOptions& options) : profile_(options.profile) {
    const Environment& environment = options.environment;
    if (profile_.empty()) profile_ = environment("AWS_PROFILE");
    if (profile_.empty()) profile_ = "default";
    path_ = environment("AWS_SHARED_CREDENTIALS_FILE");
    if (path_.empty()) path_ = environment("HOME") + "/.aws/credentials";
  }

  absl::StatusOr<Credentials> Get() override {
    ASSIGN_OR_RETURN(const std::string text, ReadFile(path_, kMostCredentialsFile));
    Credentials found;
    bool here = false, seen = false;
    for (absl::string_view line : absl::StrSplit(text, '\n')) {
      line = absl::StripAsciiWhitespace(line);
      if (line.empty() || line[0] == '#' || line[0] == ';') continue;
      if (line[0] == '[') {
        const absl::string_view name = line.substr(1, line.find(']') - 1);
        here = absl::StripAsciiWhitespace(name) == profile_;
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
    const std::string where = absl::StrCat(path_, " [", Shown(profile_), "]");
    if (!seen) return absl::NotFoundError(where + ": there is no such profile");
    if (found.access_key.empty() || found.secret_key.empty()) {
      return absl::UnauthenticatedError(where +
                                        " has no aws_access_key_id or no aws_secret_access_key");
    }
    return found;
  }

 private:
  std::string profile_, path_;
};

class Kept final : public CredentialsProvider {
 public:
  explicit Kept(std::unique_ptr<CredentialsProvider> source) : source_(std::move(source)) {}

  absl::StatusOr<Credentials> Get() override {
    absl::MutexLock lock(&mu_);
    const absl::Time now = absl::Now();
    if (kept_.has_value() && now < kept_->expires - kRenewBefore) return *kept_;
    absl::StatusOr<Credentials> fresh = source_->Get();
    if (fresh.ok()) {
      kept_ = *fresh;
    } else if (kept_.has_value() && now < kept_->expires) {
      return *kept_;
    }
    return fresh;
  }

  void Expired(const Credentials& credentials) override {
    absl::MutexLock lock(&mu_);
    if (kept_.has_value() && kept_->access_key == credentials.access_key &&
        kept_->session_token == credentials.session_token) {
      kept_.reset();
    }
    source_->Expired(credentials);
  }

 private:
  absl::Mutex mu_;
  const std::unique_ptr<CredentialsProvider> source_ ABSL_GUARDED_BY(mu_);
  std::optional<Credentials> kept_ ABSL_GUARDED_BY(mu_);
};

class First final : public CredentialsProvider {
 public:
  explicit First(std::vector<std::unique_ptr<CredentialsProvider>> sources)
      : sources_(std::move(sources)) {}

  absl::StatusOr<Credentials> Get() override {
    absl::MutexLock lock(&mu_);
    if (chosen_ != nullptr) return chosen_->Get();
    std::vector<std::string> looked;
    for (const auto& source : sources_) {
      absl::StatusOr<Credentials> found = source->Get();
      if (found.ok()) chosen_ = source.get();
      if (found.ok() || !absl::IsNotFound(found.status())) return found;
      looked.emplace_back(found.status().message());
    }
    return absl::UnauthenticatedError(
        absl::StrCat("no credentials for the bucket: ", absl::StrJoin(looked, "; ")));
  }

  void Expired(const Credentials& credentials) override {
    absl::MutexLock lock(&mu_);
    if (chosen_ != nullptr) chosen_->Expired(credentials);
  }

 private:
  absl::Mutex mu_;
  const std::vector<std::unique_ptr<CredentialsProvider>> sources_;
  CredentialsProvider* chosen_ ABSL_GUARDED_BY(mu_) = nullptr;
};

}  // namespace

std::string ProcessEnvironment(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::unique_ptr<CredentialsProvider> GivenCredentials(Credentials credentials) {
  return std::make_unique<Given>(std::move(credentials));
}

std::unique_ptr<CredentialsProvider> EnvironmentCredentials(const CredentialsOptions& options) {
  return std::make_unique<FromEnvironment>(options.environment);
}

std::unique_ptr<CredentialsProvider> FileCredentials(const CredentialsOptions& options) {
  return std::make_unique<FromFile>(options);
}

std::unique_ptr<CredentialsProvider> KeptCredentials(std::unique_ptr<CredentialsProvider> source) {
  return std::make_unique<Kept>(std::move(source));
}

std::unique_ptr<CredentialsProvider> FirstOf(
    std::vector<std::unique_ptr<CredentialsProvider>> sources) {
  return std::make_unique<First>(std::move(sources));
}

std::unique_ptr<CredentialsProvider> DefaultCredentials(const CredentialsOptions& options) {
  std::vector<std::unique_ptr<CredentialsProvider>> sources;
  // A file may be written anew by whoever renews what stands in it.
  if (!options.profile.empty()) {
    sources.push_back(FileCredentials(options));
    return FirstOf(std::move(sources));
  }
  sources.push_back(EnvironmentCredentials(options));
  sources.push_back(KeptCredentials(WebIdentityCredentials(options)));
  sources.push_back(FileCredentials(options));
  sources.push_back(KeptCredentials(InstanceCredentials(options)));
  return FirstOf(std::move(sources));
}

}  // namespace carrel::kvstore
