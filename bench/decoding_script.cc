#include "bench/decoding_script.h"

#include <algorithm>

#include "absl/time/time.h"
#include "carrel/v1/context.pb.h"
#include "common/checksum.h"
#include "common/status.h"
#include "decoder/client/store_client_grpc.h"
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
  for (const auto& field : m.fingerprint().fields())
    script.fingerprint.emplace_back(field.name(), field.value());
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
  RETURN_IF_ERROR(
      session.client_
          ->Open({.context = context, .fingerprint = script.fingerprint, .sink = 4, .local = 64})
          .status());
  return session;
}

absl::StatusOr<uint32_t> Decoding::Ask(int64_t step, int32_t layer) {
  retrieval::Query query;
  query.layer = Layer(layer);
  query.tokens = 1;
  query.queries = script_->queries[static_cast<size_t>(step)][static_cast<size_t>(layer)];
  query.selection = select::TopK{top_k_};
  query.want = retrieval::Want::kAttend;
  ASSIGN_OR_RETURN(const retrieval::RequestId id, client_->Send(std::move(query)));
  uint32_t crc = 0;
  const auto extend = [&](absl::Span<const float> numbers) {
    crc = ExtendCrc32c(crc, absl::string_view(reinterpret_cast<const char*>(numbers.data()),
                                              numbers.size() * sizeof(float)));
  };
  for (bool last = false; !last;) {
    ASSIGN_OR_RETURN(const retrieval::Part part, client_->Next(id));
    for (const retrieval::Piece& piece : part.pieces) {
      extend(piece.out);
      extend(piece.lse);
    }
    last = part.last;
  }
  return crc;
}

}  // namespace carrel::bench
