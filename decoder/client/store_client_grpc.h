// What:    a retrieval::Session over RetrievalService.Session: one stream; and gRPC's form of a login. The only place of
//          decoder/ that knows gRPC.
// Errors:  Unavailable no server at the address (names it) or the stream broke.
// Threads: as Session's; a reader thread of the client's own receives. Destroying the client cancels
//          the stream.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/server_login.h"
#include "retrieval/session.h"

namespace grpc {
class Channel;
class ChannelArguments;
class ChannelCredentials;
}  // namespace grpc

namespace carrel::decoder {

// address: "unix:PATH" or "HOST:PORT". Connects within the deadline or fails.
// request_timeout: how long each answer is waited for until it begins, and from part to part. The
// store is told, and leaves what is late; here it is DeadlineExceeded, and the session goes on.
// patient: a server that does not listen now may come within the deadline; false: the first refusal is final.
// context: what is to be opened, for who stands between and chooses a server by it (the metadata kContextMetadata,
// and common/routing.h's); empty: nothing is said.
absl::StatusOr<std::unique_ptr<retrieval::Session>> ConnectToStore(
    const std::string& address, absl::Duration deadline, const ServerLogin& login = {},
    absl::Duration request_timeout = absl::InfiniteDuration(), const std::string& context = "",
    bool patient = true);
inline constexpr char kContextMetadata[] = "carrel-context-bin";

// The same over a channel that exists. key: presented; empty: none.
absl::StatusOr<std::unique_ptr<retrieval::Session>> OpenStoreChannel(
    const std::shared_ptr<grpc::Channel>& channel, absl::Duration deadline,
    const std::string& key = "", absl::Duration request_timeout = absl::InfiniteDuration(),
    const std::string& context = "");

std::shared_ptr<grpc::ChannelCredentials> CredentialsOf(const ServerLogin& login);

// Of a channel to an address: what keeps gRPC from asking a proxy for this machine itself.
grpc::ChannelArguments ProxyArguments(const std::string& address);

// A hint where no server answers: ", or it wants TLS (--tls-ca)".
std::string HintOf(const ServerLogin& login);

}  // namespace carrel::decoder
