// What:   the parts of a request that say what it is about: its target (origin or absolute form, query, percent
//         encoding), and the routes of carrel api with the methods and the size that each takes.
// Source: RFC 9110, RFC 9112 (sections 3.2, 7.1), RFC 3986.
// Errors: InvalidArgument a target that is none, with the byte.
// Threads: reentrant.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel::http_api {

struct HttpTarget {
  std::vector<std::string>
      segments;           // of the path, decoded; empty ones are left out: "/v1//models/" has two
  std::string query;      // behind '?', as it came
  std::string authority;  // of the absolute form, which replaces Host; empty: none
};
absl::StatusOr<HttpTarget> ParseTarget(absl::string_view target);

// A parameter of a query, %XX and + taken as bytes; empty: none.
std::string QueryParameter(absl::string_view query, absl::string_view name);

// Which bound a request's body has.
enum class BodyBound : uint8_t { kNone = 0, kQuestion = 1, kDocument = 2 };

struct HttpRoute {
  const char* method;
  const char*
      pattern;  // "/v1/contexts/{}": {} stands for one segment, of a model's name for all that follow
  bool open;    // no key is asked for
  BodyBound body;
};

struct RouteFound {
  const HttpRoute* route = nullptr;  // null: no such route, or not with this method
  std::string name;                  // what {} stands for
  std::string allow;  // methods of the path, "GET, HEAD"; empty: there is no such path
};
// HEAD is answered where GET is.
RouteFound FindRoute(absl::string_view method, const std::vector<std::string>& segments);
// "GET /v1/contexts/{}": as kvstore/access/right.h names it.
std::string RouteCall(const HttpRoute& route);

// Whether Host names this machine by address or as localhost: other names can be pointed here by anybody.
bool IsLocalHostOrAddress(absl::string_view host);
// The same host and port, for Origin and Host; names have no case.
bool SameAuthority(absl::string_view a, absl::string_view b);

}  // namespace carrel::http_api
