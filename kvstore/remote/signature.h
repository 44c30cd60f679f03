// What:   AWS Signature Version 4 of requests to S3 and STS.
// Source: "Authenticating Requests (AWS Signature Version 4)" of the Amazon S3 API reference; its
//         examples are signature_test.cc.
// Edge:   S3 wants a path that is encoded once, as it is sent; a query's pairs are ordered by encoded
//         name, then value.
// Threads: any.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace carrel::kvstore {

// What a request is signed with. Never printed: nothing here has a << or a ToString.
struct Credentials {
  std::string access_key, secret_key;
  std::string session_token;  // of temporary ones; empty: none
  absl::Time expires = absl::InfiniteFuture();
};

using NameValues = std::vector<std::pair<std::string, std::string>>;

// A request before it is encoded.
struct RequestToSign {
  std::string method;
  std::string host;     // with a port that is not the scheme's own
  std::string path;     // not encoded; begins with '/'
  NameValues query;     // not encoded
  NameValues headers;   // names in lower case; host is not among them
  std::string payload;  // lower-case SHA-256 of the body
};
// SHA-256 of no bytes.
inline constexpr absl::string_view kEmptyPayload =
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

struct SigningScope {
  std::string region;
  std::string service = "s3";
  absl::Time time;
};

// Everything but A-Z a-z 0-9 - . _ ~ as %XX; '/' too, unless it is kept.
std::string PercentEncoded(absl::string_view text, bool keep_slash);
// "a=b&c=", encoded and ordered; empty for no pairs.
std::string CanonicalQuery(const NameValues& query);

// The three steps of the specification. CanonicalRequest: of headers that include host.
std::string CanonicalRequest(const RequestToSign& request, const NameValues& signed_headers);
std::string StringToSign(const SigningScope& scope, absl::string_view canonical_request);
// 64 lower-case digits.
std::string SignatureOf(const SigningScope& scope, absl::string_view secret_key,
                        absl::string_view string_to_sign);

// Adds x-amz-date, x-amz-content-sha256 (of S3), x-amz-security-token and authorization.
void SignRequest(const Credentials& credentials, const SigningScope& scope, RequestToSign& request);

}  // namespace carrel::kvstore
