// Credentials that a service gives out: STS for a web identity, and the metadata of an instance.
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
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

absl::StatusOr<Credentials> ReadInstanceCredentials(absl::string_view body) {
  const absl::StatusOr<nlohmann::json> json =
      ParseJsonObject(body, "instance metadata", kMessageBounds);
  // What a message would show of it may be a secret.
  if (!json.ok()) return absl::UnavailableError("instance metadata: no JSON object");
  const JsonFields fields("instance metadata", *json);
  const auto text = [&](const char* name) { return fields.StringOr(name, "").value_or(""); };
  Credentials found{.access_key = text("AccessKeyId"),
                    .secret_key = text("SecretAccessKey"),
                    .session_token = text("Token")};
  if (found.access_key.empty() || found.secret_key.empty()) {
    return absl::UnauthenticatedError("instance metadata: no AccessKeyId or no SecretAccessKey");
  }
  ASSIGN_OR_RETURN(found.expires, ReadIsoTime(text("Expiration"), "instance metadata"));
  return found;
}

}  // namespace

CredentialsSource WebIdentityCredentials(const CredentialsOptions& options) {
  const Environment& environment = options.environment;
  const std::string token_file = environment("AWS_WEB_IDENTITY_TOKEN_FILE");
  const std::string role = environment("AWS_ROLE_ARN");
  std::string session = environment("AWS_ROLE_SESSION_NAME");
  if (session.empty()) session = "carrel";
  std::string endpoint = environment("AWS_ENDPOINT_URL_STS");
  if (endpoint.empty()) endpoint = absl::StrCat("https://sts.", options.region, ".amazonaws.com");
  return [=,
          http = std::make_shared<HttpClient>(options.ca_file)]() -> absl::StatusOr<Credentials> {
    if (token_file.empty() || role.empty()) {
      return absl::NotFoundError("AWS_WEB_IDENTITY_TOKEN_FILE and AWS_ROLE_ARN are not set");
    }
    // Anew each time: whoever put the file there renews it.
    const absl::StatusOr<std::string> token = ReadFile(token_file, kMostTokenBytes);
    if (!token.ok()) return absl::UnauthenticatedError(token.status().message());
    const std::string body =
        CanonicalQuery({{"Action", "AssumeRoleWithWebIdentity"},
                        {"RoleArn", role},
                        {"RoleSessionName", session},
                        {"Version", "2011-06-15"},
                        {"WebIdentityToken", std::string(absl::StripAsciiWhitespace(*token))}});
    ASSIGN_OR_RETURN(const HttpReply reply,
                     http->Send({.method = "POST",
                                 .url = std::string(absl::StripSuffix(endpoint, "/")) + "/",
                                 .headers = {{"content-type", "application/x-www-form-urlencoded"}},
                                 .body = body,
                                 .deadline = kAsk}));
    if (reply.status == 200) return ReadAssumedRole(reply.body);
    const std::string what = absl::StrCat("role ", Shown(role), " for a web identity: HTTP ",
                                          reply.status, " ", ReadS3Error(reply.body).code);
    return reply.status >= 500 ? absl::UnavailableError(what) : absl::UnauthenticatedError(what);
  };
}

CredentialsSource InstanceCredentials(const CredentialsOptions& options) {
  std::string endpoint = options.environment("AWS_EC2_METADATA_SERVICE_ENDPOINT");
  if (endpoint.empty()) endpoint = "http://169.254.169.254";
  endpoint = std::string(absl::StripSuffix(endpoint, "/"));
  const bool disabled =
      absl::AsciiStrToLower(options.environment("AWS_EC2_METADATA_DISABLED")) == "true";
  return [=, http = std::make_shared<HttpClient>()]() -> absl::StatusOr<Credentials> {
    if (disabled) return absl::NotFoundError("AWS_EC2_METADATA_DISABLED is true");
    const auto ask = [&](const char* method, const std::string& path, const NameValues& headers) {
      return http->Send({.method = method,
                         .url = endpoint + path,
                         .headers = headers,
                         .most_bytes = kMostTokenBytes,
                         .deadline = absl::Seconds(2)});
    };
    const absl::StatusOr<HttpReply> token =
        ask("PUT", "/latest/api/token", {{"x-aws-ec2-metadata-token-ttl-seconds", "21600"}});
    if (!token.ok() || token->status != 200) {
      return absl::NotFoundError(absl::StrCat("no instance metadata at ", ShownUrl(endpoint)));
    }
    const NameValues proof = {{"x-aws-ec2-metadata-token", token->body}};
    const std::string folder = "/latest/meta-data/iam/security-credentials/";
    ASSIGN_OR_RETURN(const HttpReply roles, ask("GET", folder, proof));
    const std::string role(absl::StripAsciiWhitespace(roles.body.substr(0, roles.body.find('\n'))));
    if (roles.status != 200 || role.empty()) {
      return absl::NotFoundError("the instance has no role");
    }
    ASSIGN_OR_RETURN(const HttpReply reply,
                     ask("GET", folder + PercentEncoded(role, false), proof));
    if (reply.status == 200) return ReadInstanceCredentials(reply.body);
    return absl::UnavailableError(
        absl::StrCat("instance metadata of role ", Shown(role), ": HTTP ", reply.status));
  };
}

}  // namespace carrel::kvstore
