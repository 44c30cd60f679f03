#include "http_api/http_message.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace carrel::http_api {
namespace {

constexpr HttpRoute kRoutes[] = {
    {"GET", "/", true, BodyBound::kNone},
    {"GET", "/health", true, BodyBound::kNone},
    {"GET", "/healthz", true, BodyBound::kNone},
    {"GET", "/ready", true, BodyBound::kNone},
    {"GET", "/metrics", false, BodyBound::kNone},
    {"GET", "/v1/models", false, BodyBound::kNone},
    {"GET", "/v1/models/{}", false, BodyBound::kNone},
    {"POST", "/v1/completions", false, BodyBound::kQuestion},
    {"POST", "/v1/chat/completions", false, BodyBound::kQuestion},
    {"GET", "/v1/contexts", false, BodyBound::kNone},
    {"POST", "/v1/contexts", false, BodyBound::kDocument},
    {"GET", "/v1/contexts/{}", false, BodyBound::kNone},
    {"DELETE", "/v1/contexts/{}", false, BodyBound::kNone},
    {"GET", "/v1/contexts/{}/events", false, BodyBound::kNone},
    {"GET", "/v1/contexts/{}/text", false, BodyBound::kNone},
    {"POST", "/v1/contexts/{}/warm", false, BodyBound::kNone},
};

int HexDigit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// %XX as bytes; what is no such thing stays as it is.
std::string Decoded(absl::string_view text, bool plus_is_space) {
  std::string bytes;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '%' && i + 2 < text.size() && HexDigit(text[i + 1]) >= 0 &&
        HexDigit(text[i + 2]) >= 0) {
      bytes += static_cast<char>(16 * HexDigit(text[i + 1]) + HexDigit(text[i + 2]));
      i += 2;
    } else {
      bytes += plus_is_space && text[i] == '+' ? ' ' : text[i];
    }
  }
  return bytes;
}

bool Matches(absl::string_view pattern, const std::vector<std::string>& segments,
             std::string* name) {
  const std::vector<absl::string_view> parts = absl::StrSplit(pattern, '/', absl::SkipEmpty());
  // A model's name may have slashes ("owner/model"), which clients leave as they are.
  if (pattern == "/v1/models/{}" && segments.size() > 3) {
    *name = absl::StrJoin(segments.begin() + 2, segments.end(), "/");
    return segments[0] == parts[0] && segments[1] == parts[1];
  }
  if (parts.size() != segments.size()) return false;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i] == "{}") {
      *name = segments[i];
    } else if (parts[i] != segments[i]) {
      return false;
    }
  }
  return true;
}

struct HostAndPort {
  std::string host;  // lower case, without the dot at its end, or "[..]"
  int port = -1;     // none
  bool valid = false;
};

HostAndPort SplitAuthority(absl::string_view text) {
  HostAndPort out;
  const size_t bracket = text.find(']');
  const size_t colon = text.find(':', bracket == absl::string_view::npos ? 0 : bracket);
  out.host = absl::AsciiStrToLower(text.substr(0, colon));
  if (colon != absl::string_view::npos &&
      (!absl::SimpleAtoi(text.substr(colon + 1), &out.port) || out.port < 0 || out.port > 65535 ||
       text.substr(colon + 1).find_first_not_of("0123456789") != absl::string_view::npos)) {
    return out;
  }
  if (absl::EndsWith(out.host, ".")) out.host.pop_back();
  out.valid = !out.host.empty() && std::all_of(out.host.begin(), out.host.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '.' || c == '-' || c == '_' ||
           c == ':' || c == '[' || c == ']';
  });
  return out;
}

}  // namespace

absl::StatusOr<HttpTarget> ParseTarget(absl::string_view target) {
  HttpTarget out;
  for (size_t i = 0; i < target.size(); ++i) {
    const auto byte = static_cast<unsigned char>(target[i]);
    if (byte <= 0x20 || byte == 0x7f) {
      return absl::InvalidArgumentError(absl::StrCat("the target's byte ", i, " is a control"));
    }
  }
  for (const absl::string_view scheme : {"http://", "https://"}) {
    if (!absl::StartsWithIgnoreCase(target, scheme)) continue;
    target.remove_prefix(scheme.size());
    const size_t end = std::min(target.find_first_of("/?#"), target.size());
    out.authority = std::string(target.substr(0, end));
    if (out.authority.empty() || out.authority.find('@') != std::string::npos) {
      return absl::InvalidArgumentError("the target's authority is none");
    }
    target.remove_prefix(end);
    if (target.empty() || target[0] != '/')
      return absl::InvalidArgumentError("a target has a path");
    break;
  }
  if (target == "*") return out;  // OPTIONS of the server
  if (target.empty() || target[0] != '/') {
    return absl::InvalidArgumentError("a target begins with / or http://");
  }
  target = target.substr(0, target.find('#'));
  const size_t question = target.find('?');
  if (question != absl::string_view::npos) out.query = std::string(target.substr(question + 1));
  for (const absl::string_view segment :
       absl::StrSplit(target.substr(0, question), '/', absl::SkipEmpty())) {
    out.segments.push_back(Decoded(segment, /*plus_is_space=*/false));
  }
  return out;
}

std::string QueryParameter(absl::string_view query, absl::string_view name) {
  for (absl::string_view one : absl::StrSplit(query, '&')) {
    const size_t equals = one.find('=');
    if (equals == absl::string_view::npos || Decoded(one.substr(0, equals), true) != name) continue;
    return Decoded(one.substr(equals + 1), /*plus_is_space=*/true);
  }
  return "";
}

RouteFound FindRoute(absl::string_view method, const std::vector<std::string>& segments) {
  RouteFound found;
  for (const HttpRoute& route : kRoutes) {
    std::string name;
    if (!Matches(route.pattern, segments, &name)) continue;
    absl::StrAppend(&found.allow, found.allow.empty() ? "" : ", ", route.method,
                    absl::string_view(route.method) == "GET" ? ", HEAD" : "");
    if (method == route.method || (method == "HEAD" && absl::string_view(route.method) == "GET")) {
      found.route = &route;
      found.name = std::move(name);
    }
  }
  if (!found.allow.empty()) absl::StrAppend(&found.allow, ", OPTIONS");
  return found;
}

std::string RouteCall(const HttpRoute& route) {
  return absl::StrCat(route.method, " ", route.pattern);
}

bool IsLocalHostOrAddress(absl::string_view text) {
  const HostAndPort at = SplitAuthority(text);
  if (!at.valid) return false;
  if (at.host == "localhost") return true;
  const auto numeric = [](char c) { return absl::ascii_isxdigit(c) || c == '.' || c == ':'; };
  if (at.host.front() == '[') {
    return at.host.size() > 2 && at.host.back() == ']' &&
           std::all_of(at.host.begin() + 1, at.host.end() - 1, numeric);
  }
  const std::vector<absl::string_view> parts = absl::StrSplit(at.host, '.');
  return parts.size() == 4 && std::all_of(parts.begin(), parts.end(), [](absl::string_view part) {
           int value = -1;
           return part.size() <= 3 && absl::SimpleAtoi(part, &value) && value >= 0 &&
                  value <= 255 && std::all_of(part.begin(), part.end(), absl::ascii_isdigit);
         });
}

bool SameAuthority(absl::string_view a, absl::string_view b) {
  const HostAndPort one = SplitAuthority(a), other = SplitAuthority(b);
  return one.valid && other.valid && one.host == other.host && one.port == other.port;
}

}  // namespace carrel::http_api
