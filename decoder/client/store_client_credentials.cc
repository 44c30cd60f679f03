#include "decoder/client/store_client_credentials.h"

#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include "common/http_proxy.h"

namespace carrel::decoder {

std::shared_ptr<grpc::ChannelCredentials> CredentialsOf(const ServerLogin& login) {
  if (!login.uses_tls()) return grpc::InsecureChannelCredentials();
  grpc::SslCredentialsOptions options;
  options.pem_root_certs = login.tls.ca;
  options.pem_cert_chain = login.tls.certificate;
  options.pem_private_key = login.tls.key;
  return grpc::SslCredentials(options);
}

grpc::ChannelArguments ProxyArguments(const std::string& address) {
  grpc::ChannelArguments arguments;
  if (NeedsNoProxy(address)) arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return arguments;
}

std::string HintOf(const ServerLogin& login) {
  if (!login.uses_tls()) return ", or it wants TLS (--tls-ca)";
  if (login.tls.certificate.empty()) {
    return ", or it has no certificate of the --tls-ca for this name, or wants one (--tls-cert)";
  }
  return ", or one of both certificates is not what the other trusts (--tls-ca, --tls-cert)";
}

}  // namespace carrel::decoder
