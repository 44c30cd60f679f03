// What: gRPC's form of a login: the channel's credentials, and the metadata of each call.
#pragma once

#include <memory>
#include <string>

#include "common/server_login.h"

namespace grpc {
class ChannelCredentials;
}

namespace carrel::decoder {

std::shared_ptr<grpc::ChannelCredentials> CredentialsOf(const ServerLogin& login);

// What may be the matter if nobody answers: ", or it speaks TLS (--tls-ca)".
std::string HintOf(const ServerLogin& login);

}  // namespace carrel::decoder
