#include "kvstore/remote/signature.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "common/checksum.h"
#include "common/hmac.h"

namespace carrel::kvstore {
namespace {

constexpr absl::string_view kAlgorithm = "AWS4-HMAC-SHA256";

std::string Stamp(absl::Time time) {
  return absl::FormatTime("%Y%m%dT%H%M%SZ", time, absl::UTCTimeZone());
}

std::string ScopeText(const SigningScope& scope) {
  return absl::StrCat(Stamp(scope.time).substr(0, 8), "/", scope.region, "/", scope.service,
                      "/aws4_request");
}

std::string NamesOf(const NameValues& headers) {
  return absl::StrJoin(headers, ";", [](std::string* out, const auto& header) {
    absl::StrAppend(out, header.first);
  });
}

// Without spaces around it, and runs of spaces as one.
std::string Trimmed(absl::string_view value) {
  std::string out;
  for (const char c : absl::StripAsciiWhitespace(value)) {
    if (c == ' ' && !out.empty() && out.back() == ' ') continue;
    out.push_back(c);
  }
  return out;
}

}  // namespace

std::string PercentEncoded(absl::string_view text, bool keep_slash) {
  std::string out;
  for (const char c : text) {
    const bool plain = absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '.' ||
                       c == '_' || c == '~' || (c == '/' && keep_slash);
    if (plain) {
      out.push_back(c);
    } else {
      absl::StrAppendFormat(&out, "%%%02X", static_cast<unsigned char>(c));
    }
  }
  return out;
}

std::string CanonicalQuery(const NameValues& query) {
  NameValues pairs;
  for (const auto& [name, value] : query) {
    pairs.emplace_back(PercentEncoded(name, false), PercentEncoded(value, false));
  }
  std::sort(pairs.begin(), pairs.end());
  return absl::StrJoin(pairs, "&", absl::PairFormatter("="));
}

std::string CanonicalRequest(const RequestToSign& request, const NameValues& signed_headers) {
  std::string out = absl::StrCat(request.method, "\n", PercentEncoded(request.path, true), "\n",
                                 CanonicalQuery(request.query), "\n");
  for (const auto& [name, value] : signed_headers) {
    absl::StrAppend(&out, name, ":", Trimmed(value), "\n");
  }
  absl::StrAppend(&out, "\n", NamesOf(signed_headers), "\n", request.payload);
  return out;
}

std::string StringToSign(const SigningScope& scope, absl::string_view canonical_request) {
  return absl::StrCat(kAlgorithm, "\n", Stamp(scope.time), "\n", ScopeText(scope), "\n",
                      Sha256Hex(canonical_request));
}

std::string SignatureOf(const SigningScope& scope, absl::string_view secret_key,
                        absl::string_view string_to_sign) {
  std::string key = HmacSha256(absl::StrCat("AWS4", secret_key), Stamp(scope.time).substr(0, 8));
  key = HmacSha256(key, scope.region);
  key = HmacSha256(key, scope.service);
  key = HmacSha256(key, "aws4_request");
  return absl::BytesToHexString(HmacSha256(key, string_to_sign));
}

void SignRequest(const Credentials& credentials, const SigningScope& scope,
                 RequestToSign& request) {
  request.headers.emplace_back("x-amz-date", Stamp(scope.time));
  if (scope.service == "s3") {
    request.headers.emplace_back("x-amz-content-sha256", request.payload);
  }
  if (!credentials.session_token.empty()) {
    request.headers.emplace_back("x-amz-security-token", credentials.session_token);
  }
  NameValues headers = request.headers;
  headers.emplace_back("host", request.host);
  std::sort(headers.begin(), headers.end());
  const std::string signature = SignatureOf(
      scope, credentials.secret_key, StringToSign(scope, CanonicalRequest(request, headers)));
  request.headers.emplace_back(
      "authorization",
      absl::StrCat(kAlgorithm, " Credential=", credentials.access_key, "/", ScopeText(scope),
                   ",SignedHeaders=", NamesOf(headers), ",Signature=", signature));
}

}  // namespace carrel::kvstore
