#include "bench/decoding_script.h"

#include <algorithm>

#include "absl/time/time.h"
#include "carrel/v1/context.pb.h"
#include "carrel/v1/retrieval.pb.h"
#include "common/checksum.h"
#include "common/status.h"
#include "decoder/client/store_client_grpc.h"
#include "decoder/client/wire.h"
#include "kvstore/index/rows/stored_queries.h"
#include "kvstore/storage/store.h"

namespace carrel::bench {

absl::StatusOr<Script> ReadScript(const kvstore::StoredContext& context) {
  const v1::Manifest& m = context.manifest();
  Script script;
  script.shape = {.layers = static_cast<int32_t>(m.layers()),
                  .q_heads = static_cast<int32_t>(m.q_heads()),
                  .kv_heads = static_cast<int32_t>(m.kv_heads()),
                  .head_dim = static_cast<int32_t>(m.head_dim())};
  script.fingerprint = m.fingerprint().SerializeAsString();
  for (int32_t layer = 0; layer < script.shape.layers; ++layer) {
    for (int32_t head = 0; head < script.shape.kv_heads; ++head) {
      ASSIGN_OR_RETURN(const kvstore::SampledQueries sampled,
                       kvstore::ReadSampledQueries(context, Layer(layer), KvHead(head)));
      // The later half of the document: questions come after it.
      const int64_t steps = std::max<int64_t>(1, sampled.samples() / 2);
      script.queries.resize(static_cast<size_t>(steps));
      for (int64_t step = 0; step < steps; ++step) {
        auto& layers = script.queries[static_cast<size_t>(step)];
        layers.resize(script.shape.layers);
        const float* first = sampled.Query(sampled.samples() - steps + step, 0);
        layers[layer].insert(layers[layer].end(), first, first + sampled.group * sampled.head_dim);
      }
    }
  }
  return script;
}

absl::StatusOr<Decoding> Decoding::Open(const std::string& address, const std::string& context,
                                        int64_t top_k, const Script& script) {
  Decoding session(top_k, script);
  ASSIGN_OR_RETURN(session.client_, decoder::ConnectToStore(address, absl::Seconds(10)));
  v1::Open open;
  open.set_context(context);
  CARREL_CHECK(open.mutable_fingerprint()->ParseFromString(script.fingerprint));
  open.set_sink(4);
  open.set_local(64);
  RETURN_IF_ERROR(session.client_->Open(open).status());
  return session;
}

absl::StatusOr<uint32_t> Decoding::Ask(int64_t step, int32_t layer) {
  v1::Query query;
  query.set_layer(static_cast<uint32_t>(layer));
  const auto& q = script_->queries[static_cast<size_t>(step)][static_cast<size_t>(layer)];
  decoder::SetFloats(q.data(), {1, script_->shape.q_heads, script_->shape.head_dim},
                     query.mutable_queries());
  query.mutable_select()->set_top_k(top_k_);
  query.set_want(v1::ATTEND);
  bytes_sent_ += static_cast<int64_t>(query.ByteSizeLong());
  ASSIGN_OR_RETURN(const decoder::RequestId id, client_->Send(std::move(query)));
  uint32_t crc = 0;
  for (bool last = false; !last;) {
    ASSIGN_OR_RETURN(const v1::SessionReply part, client_->Next(id));
    bytes_received_ += static_cast<int64_t>(part.ByteSizeLong());
    for (const v1::HeadResult& head : part.query().heads()) {
      crc = ExtendCrc32c(crc, head.out().data());
      crc = ExtendCrc32c(crc, head.lse().data());
    }
    last = part.last();
  }
  return crc;
}

}  // namespace carrel::bench
