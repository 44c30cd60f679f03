// What:   what gRPC knows of who calls: a key in "authorization: Bearer KEY", the names of a client certificate, the
//         user at the other end of a Unix socket. Admission (kvstore/access) makes of it who he is.
// Threads: any.
#pragma once

#include "kvstore/access/access.h"

namespace grpc {
class ServerContextBase;
}

namespace carrel::kvstore {

Caller CallerOf(const grpc::ServerContextBase& context);

}  // namespace carrel::kvstore
