#include "bench/retrieval/engine.h"

#include <algorithm>
#include <cmath>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "kvstore/engine/engine.h"
#include "kvstore/storage/store.h"

namespace carrel::bench {
namespace {

using kvstore::QueryRequest;

class EngineRun {
 public:
  explicit EngineRun(const EngineCase& c) : case_(c) {}

  absl::StatusOr<Result> Run() {
    RETURN_IF_ERROR(Open());
    Result result = Describe();
    // Every row is verified and in memory before anything is timed; errors on the way.
    double error = 0;
    int64_t outputs = 0;
    const int64_t judged = std::min<int64_t>(4, queries());
    for (int64_t token = 0; token < judged; ++token) {
      for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
        ASSIGN_OR_RETURN(const std::vector<float> all, Ask(layer, token, select::All()));
        ASSIGN_OR_RETURN(const std::vector<float> top,
                         Ask(layer, token, select::TopK{case_.top_k}));
        error += RelativeError(top, all);
        ++outputs;
      }
    }
    result.quality.recall = -1;  // not measured
    result.quality.output_error = error / static_cast<double>(outputs);
    std::vector<double> ms;
    const absl::Time start = absl::Now();
    for (int64_t i = 0; i < std::max(queries(), case_.tokens); ++i) {
      if (i >= queries() && absl::Now() - start > absl::Seconds(case_.seconds)) break;
      const absl::Time before = absl::Now();
      for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
        RETURN_IF_ERROR(Ask(layer, i % queries(), select::TopK{case_.top_k}).status());
      }
      ms.push_back(absl::ToDoubleMilliseconds(absl::Now() - before) * result.as_layers /
                   shape_.layers);
    }
    std::sort(ms.begin(), ms.end());
    result.ms_per_token = ms[ms.size() / 2];
    result.ms_per_token_p10 = ms[ms.size() / 10];
    result.ms_per_token_p90 = ms[ms.size() * 9 / 10];
    result.samples = static_cast<int64_t>(ms.size());
    result.search_us = 1000 * result.ms_per_token / (result.as_layers * shape_.kv_heads);
    return result;
  }

 private:
  absl::Status Open() {
    ASSIGN_OR_RETURN(auto store,
                     kvstore::Store::Open(case_.store_folder, kvstore::StoreMode::kReadOnly));
    ASSIGN_OR_RETURN(const auto context, store->OpenContext(case_.name));
    manifest_ = context->manifest();
    shape_ = {.layers = static_cast<int32_t>(manifest_.layers()),
              .q_heads = static_cast<int32_t>(manifest_.q_heads()),
              .kv_heads = static_cast<int32_t>(manifest_.kv_heads()),
              .head_dim = static_cast<int32_t>(manifest_.head_dim())};
    for (Layer layer(0); layer.value() < shape_.layers; layer = layer.next()) {
      auto& heads = heads_.emplace_back();
      for (KvHead head(0); head.value() < shape_.kv_heads; head = head.next()) {
        ASSIGN_OR_RETURN(heads.emplace_back(), OpenHead(*context, layer, head, 8));
      }
    }
    kvstore::EngineConfig config;
    config.search_threads = case_.threads;
    config.memory_budget_bytes = int64_t{8} << 30;
    ASSIGN_OR_RETURN(engine_, kvstore::Engine::Create(config, std::move(store)));
    kvstore::OpenRequest request{{.context = case_.name, .sink = kSink, .local = kLocal}};
    for (const auto& field : manifest_.fingerprint().fields()) {
      request.fingerprint.emplace_back(field.name(), field.value());
    }
    ASSIGN_OR_RETURN(session_, engine_->OpenSession(request));
    return absl::OkStatus();
  }

  int64_t queries() const { return static_cast<int64_t>(heads_[0][0].queries.size()); }

  absl::StatusOr<std::vector<float>> Ask(Layer layer, int64_t token,
                                         const select::Selection& selection) {
    QueryRequest request{{.layer = layer, .tokens = 1}};
    for (const HeadCase& head : heads_[layer.value()]) {
      const auto& q = head.queries[token % static_cast<int64_t>(head.queries.size())];
      request.queries.insert(request.queries.end(), q.begin(), q.end());
    }
    request.selection = selection;
    if (!select::IsAll(selection)) request.effort = case_.effort;
    request.want = kvstore::Want::kAttend;
    absl::StatusOr<std::unique_ptr<kvstore::Reply>> reply = absl::UnknownError("no reply");
    absl::Notification done;
    RETURN_IF_ERROR(session_->Submit(++request_id_, std::move(request), [&](auto answered) {
      reply = std::move(answered);
      done.Notify();
    }));
    done.WaitForNotification();
    RETURN_IF_ERROR(reply.status());
    std::vector<float> out(int64_t{shape_.q_heads} * shape_.head_dim);
    std::vector<kvstore::Piece> pieces;
    while (!(*reply)->done()) {
      RETURN_IF_ERROR((*reply)->Next(int64_t{1} << 20, pieces));
      for (const kvstore::Piece& piece : pieces) {
        std::copy(piece.out.begin(), piece.out.end(),
                  out.begin() + int64_t{piece.kv_head.value()} * shape_.group() * shape_.head_dim);
      }
    }
    return out;
  }

  static double RelativeError(const std::vector<float>& out, const std::vector<float>& ref) {
    double error = 0, norm = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      error += std::pow(double{out[i]} - ref[i], 2);
      norm += std::pow(double{ref[i]}, 2);
    }
    return std::sqrt(error / std::max(norm, 1e-30));
  }

  Result Describe() const {
    Result result;
    result.context = case_.name;
    result.tokens = manifest_.tokens();
    result.kind = "engine:" + manifest_.index().kind();
    for (const auto& field : manifest_.fingerprint().fields()) {
      result.synthetic |= field.name() == "synthetic";
    }
    result.top_k = case_.top_k;
    result.effort = case_.effort;
    result.effort_name = "of the engine's index";
    double index_bytes = 0;
    for (const auto& sizes : manifest_.layer_sizes()) {
      index_bytes += static_cast<double>(sizes.index_bytes());
    }
    result.bytes_per_key =
        index_bytes / static_cast<double>(manifest_.tokens() * shape_.layers * shape_.kv_heads);
    result.layers_measured = shape_.layers;
    result.as_layers = case_.as_layers > 0 ? case_.as_layers : shape_.layers;
    result.heads_measured = int64_t{shape_.layers} * shape_.kv_heads;
    result.queries = queries();
    result.threads = case_.threads;
    result.note = "retrieval + partial attention (ATTEND)";
    return result;
  }

  const EngineCase& case_;
  v1::Manifest manifest_;
  AttentionShape shape_;
  std::vector<std::vector<HeadCase>> heads_;  // [layers][kv_heads]
  std::unique_ptr<kvstore::Engine> engine_;
  std::shared_ptr<kvstore::Session> session_;
  uint64_t request_id_ = 0;
};

}  // namespace

absl::StatusOr<Result> MeasureEngine(const EngineCase& c) { return EngineRun(c).Run(); }

}  // namespace carrel::bench
