// What:   what gRPC knows of a caller: a key in "authorization: Bearer KEY", the names of a client certificate, the
//         user at the other end of a Unix socket. Admission (kvstore/access) finds the principal.
// Threads: any.
#pragma once

#include "kvstore/access/access.h"

namespace grpc {
class ServerContextBase;
}

namespace carrel::kvstore {

Caller CallerOf(const grpc::ServerContextBase& context);

}  // namespace carrel::kvstore
