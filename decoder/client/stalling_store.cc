// What: a store for store_client_test to kill: answers Open, gives every query one part that is not
//       the last, and then nothing. Prints "ready" when it listens at the address of its argument.
#include <grpcpp/grpcpp.h>

#include <cstdio>

#include "carrel/v1/retrieval.grpc.pb.h"

namespace {

class StallingStore : public carrel::v1::RetrievalService::Service {
  grpc::Status Session(grpc::ServerContext*,
                       grpc::ServerReaderWriter<carrel::v1::SessionReply,
                                                carrel::v1::SessionRequest>* stream) override {
    stream->SendInitialMetadata();
    for (carrel::v1::SessionRequest request; stream->Read(&request);) {
      carrel::v1::SessionReply reply;
      reply.set_request_id(request.request_id());
      if (request.has_open()) {
        reply.set_last(true);
        reply.mutable_open()->set_tokens(1);
      } else {
        reply.mutable_query()->set_layer(request.query().layer());
      }
      stream->Write(reply);
    }
    return grpc::Status::OK;
  }
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  StallingStore service;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(argv[1], grpc::InsecureServerCredentials());
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return 1;
  std::puts("ready");
  std::fflush(stdout);
  server->Wait();
}
