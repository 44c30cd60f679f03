#include "common/http_proxy.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>

#include <cstdlib>
#include <cstring>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/shown.h"

namespace carrel {
namespace {

const char* Set(const char* variable) {
  const char* const value = std::getenv(variable);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

// The variable that gRPC obeys for the host; null: none.
const char* ProxyVariable(absl::string_view host) {
  if (host.empty()) return nullptr;
  const char* found = nullptr;
  for (const char* variable : {"grpc_proxy", "https_proxy", "http_proxy"}) {
    if (found == nullptr && Set(variable) != nullptr) found = variable;
  }
  const char* except = Set("no_grpc_proxy");
  if (except == nullptr) except = Set("no_proxy");
  if (found == nullptr || except == nullptr) return found;
  for (const absl::string_view entry : absl::StrSplit(except, ',', absl::SkipEmpty())) {
    if (absl::EndsWith(host, entry)) return nullptr;
  }
  return found;
}

bool IsLoopback(const sockaddr& address) {
  if (address.sa_family == AF_INET) {
    sockaddr_in v4;
    std::memcpy(&v4, &address, sizeof(v4));
    return ntohl(v4.sin_addr.s_addr) >> 24 == 127;
  }
  if (address.sa_family != AF_INET6) return false;
  sockaddr_in6 v6;
  std::memcpy(&v6, &address, sizeof(v6));
  const bool mapped = IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr) && v6.sin6_addr.s6_addr[12] == 127;
  return mapped || IN6_IS_ADDR_LOOPBACK(&v6.sin6_addr);
}

// Whether there are addresses of the host, and all are loopback.
bool StandsForLoopback(const std::string& host, int flags) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_flags = flags;
  hints.ai_socktype = SOCK_STREAM;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return false;
  const absl::Cleanup free_them = [found] { freeaddrinfo(found); };
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    if (!IsLoopback(*one->ai_addr)) return false;
  }
  return found != nullptr;
}

}  // namespace

std::string HostOf(absl::string_view address) {
  if (absl::StartsWith(address, "unix")) return "";
  for (const char* scheme : {"dns:///", "dns:", "ipv4:", "ipv6:"}) {
    if (absl::ConsumePrefix(&address, scheme)) break;
  }
  if (absl::ConsumePrefix(&address, "[")) return std::string(address.substr(0, address.find(']')));
  const size_t colon = address.rfind(':');
  // More than one and no brackets: an address of IPv6 without a port.
  const bool port = colon != absl::string_view::npos && address.find(':') == colon;
  return std::string(port ? address.substr(0, colon) : address);
}

bool IsLoopbackHost(absl::string_view host) {
  absl::ConsumeSuffix(&host, ".");
  return absl::EqualsIgnoreCase(host, "localhost") ||
         absl::EndsWithIgnoreCase(host, ".localhost") ||
         StandsForLoopback(std::string(host), AI_NUMERICHOST);
}

bool NeedsNoProxy(const std::string& address) {
  const std::string host = HostOf(address);
  if (host.empty() || IsLoopbackHost(host)) return true;
  return ProxyVariable(host) != nullptr && StandsForLoopback(host, 0);
}

std::string ProxyHint(const std::string& address) {
  const std::string host = HostOf(address);
  const char* const variable = ProxyVariable(host);
  if (variable == nullptr || NeedsNoProxy(address)) return "";
  // A proxy's address may hold a password.
  const absl::string_view value = Set(variable);
  const size_t at = value.rfind('@');
  return absl::StrCat(" (", variable, "=",
                      Shown(at == absl::string_view::npos ? value : value.substr(at + 1)),
                      " sends it through a proxy; no_proxy=", host, " goes past it)");
}

}  // namespace carrel
