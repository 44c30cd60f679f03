// What: gRPC's form of a login: the channel's credentials, and the metadata of each call.
#pragma once

#include <memory>
#include <string>

#include "common/server_login.h"

namespace grpc {
class ChannelArguments;
class ChannelCredentials;
}  // namespace grpc

namespace carrel::decoder {

std::shared_ptr<grpc::ChannelCredentials> CredentialsOf(const ServerLogin& login);

// Of a channel to an address: what keeps gRPC from asking a proxy for this machine itself.
grpc::ChannelArguments ProxyArguments(const std::string& address);

// A hint where no server answers: ", or it wants TLS (--tls-ca)".
std::string HintOf(const ServerLogin& login);

}  // namespace carrel::decoder
