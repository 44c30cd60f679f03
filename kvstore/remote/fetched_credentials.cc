// Credentials that a service gives out: STS for a web identity, and the metadata of an instance.
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "common/checksum.h"
#include "common/file.h"
#include "common/json.h"
#include "common/shown.h"
#include "common/status.h"
#include "kvstore/remote/credentials_provider.h"
#include "kvstore/remote/s3_replies.h"

namespace carrel::kvstore {
namespace {

constexpr int64_t kMostTokenBytes = 64 << 10;
constexpr absl::Duration kAsk = absl::Seconds(10);

class FromWebIdentity final : public CredentialsProvider {
 public:
  explicit FromWebIdentity(const CredentialsOptions& options) : http_(options.ca_file) {
    const Environment& environment = options.environment;
    token_file_ = environment("AWS_WEB_IDENTITY_TOKEN_FILE");
    role_ = environment("AWS_ROLE_ARN");
    session_ = environment("AWS_ROLE_SESSION_NAME");
    if (session_.empty()) session_ = "carrel";
    endpoint_ = environment("AWS_ENDPOINT_URL_STS");
    if (endpoint_.empty()) {
      endpoint_ = absl::StrCat("https://sts.", options.region, ".amazonaws.com");
    }
  }

  absl::StatusOr<Credentials> Get() override {
    if (token_file_.empty() || role_.empty()) {
      return absl::NotFoundError("AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN are not set");
    }
    // Anew each time: whoever put the file there renews it.
    const absl::StatusOr<std::string> token = ReadFile(token_file_, kMostTokenBytes);
    if (!token.ok()) return absl::UnauthenticatedError(token.status().message());
    const std::string body =
        CanonicalQuery({{"Action", "AssumeRoleWithWebIdentity"},
                        {"RoleArn", role_},
                        {"RoleSessionName", session_},
                        {"Version", "2011-06-15"},
                        {"WebIdentityToken", std::string(absl::StripAsciiWhitespace(*token))}});
    ASSIGN_OR_RETURN(const HttpReply reply,
                     http_.Send({.method = "POST",
                                 .url = std::string(absl::StripSuffix(endpoint_, "/")) + "/",
                                 .headers = {{"content-type", "application/x-www-form-urlencoded"}},
                                 .body = body,
                                 .deadline = kAsk}));
    if (reply.status == 200) return ReadAssumedRole(reply.body);
    const S3Error error = ReadS3Error(reply.body);
    const std::string what = absl::StrCat("role ", Shown(role_), " for a web identity: HTTP ",
                                          reply.status, " ", error.code);
    return reply.status >= 500 ? absl::UnavailableError(what) : absl::UnauthenticatedError(what);
  }

 private:
  HttpClient http_;
  std::string token_file_, role_, session_, endpoint_;
};

class FromInstance final : public CredentialsProvider {
 public:
  explicit FromInstance(const CredentialsOptions& options) {
    endpoint_ = options.environment("AWS_EC2_METADATA_SERVICE_ENDPOINT");
    if (endpoint_.empty()) endpoint_ = "http://169.254.169.254";
    endpoint_ = std::string(absl::StripSuffix(endpoint_, "/"));
    disabled_ = absl::AsciiStrToLower(options.environment("AWS_EC2_METADATA_DISABLED")) == "true";
  }

  absl::StatusOr<Credentials> Get() override {
    if (disabled_) return absl::NotFoundError("AWS_EC2_METADATA_DISABLED is true");
    const absl::StatusOr<HttpReply> token =
        Ask("PUT", "/latest/api/token", {{"x-aws-ec2-metadata-token-ttl-seconds", "21600"}});
    if (!token.ok() || token->status != 200) {
      return absl::NotFoundError(absl::StrCat("no instance metadata at ", ShownUrl(endpoint_)));
    }
    const NameValues proof = {{"x-aws-ec2-metadata-token", token->body}};
    const std::string folder = "/latest/meta-data/iam/security-credentials/";
    ASSIGN_OR_RETURN(const HttpReply roles, Ask("GET", folder, proof));
    const std::string role(absl::StripAsciiWhitespace(roles.body.substr(0, roles.body.find('\n'))));
    if (roles.status != 200 || role.empty()) {
      return absl::NotFoundError("the instance has no role");
    }
    ASSIGN_OR_RETURN(const HttpReply reply,
                     Ask("GET", folder + PercentEncoded(role, false), proof));
    if (reply.status != 200) {
      return absl::UnavailableError(
          absl::StrCat("instance metadata of role ", Shown(role), ": HTTP ", reply.status));
    }
    return Read(reply.body);
  }

 private:
  absl::StatusOr<HttpReply> Ask(const char* method, const std::string& path,
                                const NameValues& headers) {
    return http_.Send({.method = method,
                       .url = endpoint_ + path,
                       .headers = headers,
                       .most_bytes = kMostTokenBytes,
                       .deadline = absl::Seconds(2)});
  }

  static absl::StatusOr<Credentials> Read(absl::string_view body) {
    const absl::StatusOr<nlohmann::json> json =
        ParseJsonObject(body, "instance metadata", kMessageBounds);
    // What a message would show of it may be a secret.
    if (!json.ok()) return absl::UnavailableError("instance metadata: no JSON object");
    const JsonFields fields("instance metadata", *json);
    Credentials found;
    const auto text = [&](const char* name) {
      const absl::StatusOr<std::string> value = fields.StringOr(name, "");
      return value.ok() ? *value : "";
    };
    found.access_key = text("AccessKeyId");
    found.secret_key = text("SecretAccessKey");
    found.session_token = text("Token");
    if (found.access_key.empty() || found.secret_key.empty()) {
      return absl::UnauthenticatedError("instance metadata: no AccessKeyId or no SecretAccessKey");
    }
    ASSIGN_OR_RETURN(found.expires, ReadIsoTime(text("Expiration"), "instance metadata"));
    return found;
  }

  HttpClient http_;
  std::string endpoint_;
  bool disabled_ = false;
};

}  // namespace

std::unique_ptr<CredentialsProvider> WebIdentityCredentials(const CredentialsOptions& options) {
  return std::make_unique<FromWebIdentity>(options);
}

std::unique_ptr<CredentialsProvider> InstanceCredentials(const CredentialsOptions& options) {
  return std::make_unique<FromInstance>(options);
}

}  // namespace carrel::kvstore
