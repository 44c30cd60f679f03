#include "kvstore/service/grpc_caller.h"

#include <grpcpp/grpcpp.h>
#include <sys/socket.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace carrel::kvstore {
namespace {

// gRPC names a connection that it was given as a descriptor "fd:N".
void SetLocalPeer(int fd, Caller& caller) {
  ucred credentials{};
  socklen_t bytes = sizeof(credentials);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) return;
  caller.local = true;
  caller.uid = credentials.uid;
  caller.peer = absl::StrCat("unix:uid=", credentials.uid, ",pid=", credentials.pid);
}

std::string KeyOf(const grpc::ServerContextBase& context) {
  const auto& metadata = context.client_metadata();
  const auto [first, last] = metadata.equal_range("authorization");
  std::string key;
  for (auto it = first; it != last; ++it) {  // two of them are none that is valid
    absl::string_view value(it->second.data(), it->second.size());
    if (absl::StartsWithIgnoreCase(value, "bearer ")) value.remove_prefix(7);
    absl::StrAppend(&key, value);
  }
  return key;
}

}  // namespace

Caller CallerOf(const grpc::ServerContextBase& context) {
  Caller caller;
  caller.peer = context.peer();
  caller.key = KeyOf(context);
  absl::string_view peer = caller.peer;
  int fd = -1;
  if (absl::ConsumePrefix(&peer, "fd:") && absl::SimpleAtoi(peer, &fd)) {
    SetLocalPeer(fd, caller);
  } else if (absl::StartsWith(caller.peer, "unix:")) {
    caller.local = true;
  }
  const std::shared_ptr<const grpc::AuthContext> auth = context.auth_context();
  if (auth == nullptr || !auth->IsPeerAuthenticated()) return caller;
  for (const char* property :
       {GRPC_X509_CN_PROPERTY_NAME, GRPC_PEER_DNS_PROPERTY_NAME, GRPC_PEER_URI_PROPERTY_NAME}) {
    for (const grpc::string_ref& value : auth->FindPropertyValues(property)) {
      if (!value.empty()) caller.certificate_names.emplace_back(value.data(), value.size());
    }
  }
  return caller;
}

}  // namespace carrel::kvstore
