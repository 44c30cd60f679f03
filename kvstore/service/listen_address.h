// What:   where a server listens: "unix:PATH" or "HOST:PORT" ("[::1]:PORT" for IPv6; port 0: any
//         that is free).
// Errors: InvalidArgument names the address and what is wrong with it; FailedPrecondition an
//         address that is in use, or a path that is no socket.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace carrel::kvstore {

struct ListenAddress {
  std::string unix_path;  // empty: TCP
  std::string host;
  int32_t port = 0;
  std::string ToString() const;
};

absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view text);

// What a server tells others to reach it by: empty, unix:PATH or HOST:PORT with a port above 0, HOST a name, too.
absl::Status ValidateAdvertised(const std::string& address);

// A Unix path becomes free to bind: a socket file without a listener is removed (its server was
// killed); anything else that lies there is an error. TCP: nothing. Somebody may still come between
// this and the binding.
absl::Status PrepareToListen(const ListenAddress& address);

}  // namespace carrel::kvstore
