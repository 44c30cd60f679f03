// What:   whether gRPC would send what is for an address through a proxy that the environment names, and
//         which addresses never need one.
// Source: gRPC asks grpc_proxy, https_proxy and http_proxy, in that order, and leaves out hosts that end
//         with an entry of no_grpc_proxy or no_proxy, literally: 127.0.0.0/8 and * mean nothing there.
// Threads: any, beside no setenv.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace carrel {

// Of HOST:PORT (also dns:///HOST:PORT, [::1]:PORT): the host; empty: none, as of unix:PATH.
std::string HostOf(absl::string_view address);

// 127.0.0.0/8, ::1, localhost, and names below .localhost.
bool IsLoopbackHost(absl::string_view host);

// Whether no proxy is to be asked: a loopback host, or a name that stands for such addresses alone, which
// is looked up only where a proxy would apply.
bool NeedsNoProxy(const std::string& address);

// For a connection that failed: " (http_proxy=URL sends it through a proxy; no_proxy=HOST goes past
// it)"; empty where no proxy applies.
std::string ProxyHint(const std::string& address);

}  // namespace carrel
