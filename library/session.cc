#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "carrel/retrieval.h"
#include "carrel/v1/retrieval.pb.h"
#include "common/status.h"
#include "decoder/client/store_client.h"
#include "decoder/client/wire.h"
#include "kvstore/service/context_client.h"
#include "library/handles.h"
#include "library/status.h"

namespace carrel {
namespace library {
namespace {

template <typename T>
void Append(const v1::Tensor& tensor, std::vector<T>& out) {
  const size_t before = out.size(), count = tensor.data().size() / sizeof(T);
  out.resize(before + count);
  if (count > 0) std::memcpy(out.data() + before, tensor.data().data(), count * sizeof(T));
}

v1::Want WireWant(Want want) {
  switch (want) {
    case Want::kScores:
      return v1::IDS;
    case Want::kRows:
      return v1::ROWS;
    case Want::kValues:
      return v1::VALUES;
    case Want::kAttend:
      return v1::ATTEND;
  }
  return v1::WANT_UNSPECIFIED;
}

void SetSelect(const Selection& selection, v1::Select& select) {
  if (const auto* top_k = std::get_if<TopK>(&selection)) {
    select.set_top_k(top_k->rows);
  } else if (const auto* range = std::get_if<Range>(&selection)) {
    select.set_range(range->below);
    select.set_max_rows(range->max_rows);
  } else if (const auto* mass = std::get_if<Mass>(&selection)) {
    select.set_mass(mass->share);
    select.set_max_rows(mass->max_rows);
  } else {
    select.set_all(true);
  }
}

// The reply to one query, as its parts arrive.
class Gathered {
 public:
  Gathered(const ContextInfo& context, int64_t tokens, Want want, RowRange zone)
      : context_(context),
        group_(context.q_heads / context.kv_heads),
        want_(want),
        zone_(zone),
        heads_(static_cast<size_t>(tokens * context.kv_heads)),
        scores_(heads_.size()) {
    for (size_t i = 0; i < heads_.size(); ++i) {
      heads_[i].token = static_cast<int32_t>(i) / context.kv_heads;
      heads_[i].kv_head = static_cast<int32_t>(i) % context.kv_heads;
      scores_[i].resize(static_cast<size_t>(group_));
    }
  }

  absl::Status Add(const v1::HeadResult& part) {
    const int64_t i = int64_t{part.token()} * context_.kv_heads + part.kv_head();
    if (part.kv_head() >= static_cast<uint32_t>(context_.kv_heads) ||
        i >= static_cast<int64_t>(heads_.size())) {
      return absl::DataLossError(absl::StrCat("reply: token ", part.token(), ", kv_head ",
                                              part.kv_head(), " were not asked for"));
    }
    HeadResult& head = heads_[static_cast<size_t>(i)];
    if (want_ == Want::kAttend) return AddAttention(part, head);
    return AddRows(part, head, scores_[static_cast<size_t>(i)]);
  }

  absl::StatusOr<std::vector<HeadResult>> Finish() && {
    for (size_t i = 0; i < heads_.size(); ++i) {
      if (want_ == Want::kAttend && heads_[i].lse.empty()) {
        return absl::DataLossError(absl::StrCat("reply: nothing of token ", heads_[i].token,
                                                ", kv_head ", heads_[i].kv_head));
      }
      for (const std::vector<float>& of_q_head : scores_[i]) {
        heads_[i].scores.insert(heads_[i].scores.end(), of_q_head.begin(), of_q_head.end());
      }
    }
    return std::move(heads_);
  }

 private:
  absl::Status AddAttention(const v1::HeadResult& part, HeadResult& head) const {
    RETURN_IF_ERROR(decoder::CheckFloats(part.out(), {group_, context_.head_dim}, "out"));
    RETURN_IF_ERROR(decoder::CheckFloats(part.lse(), {group_}, "lse"));
    head.out.clear();
    head.lse.clear();
    Append(part.out(), head.out);
    Append(part.lse(), head.lse);
    return absl::OkStatus();
  }

  // A head's rows may come in several parts.
  absl::Status AddRows(const v1::HeadResult& part, HeadResult& head,
                       std::vector<std::vector<float>>& scores) const {
    const int64_t rows = decoder::Dimension(part.ids(), 0), d = context_.head_dim;
    RETURN_IF_ERROR(decoder::CheckIds(part.ids(), {rows}, "ids"));
    const size_t first = head.ids.size();
    Append(part.ids(), head.ids);
    for (size_t i = first; i < head.ids.size(); ++i) {
      if (head.ids[i] >= zone_.begin && head.ids[i] < zone_.end) continue;
      return absl::DataLossError(absl::StrCat("reply: row ", head.ids[i], " is outside the zone [",
                                              zone_.begin, ", ", zone_.end, ")"));
    }
    if (want_ != Want::kRows) {
      RETURN_IF_ERROR(decoder::CheckFloats(part.scores(), {group_, rows}, "scores"));
      std::vector<float> all;
      Append(part.scores(), all);
      for (int64_t h = 0; h < group_; ++h) {
        scores[static_cast<size_t>(h)].insert(scores[static_cast<size_t>(h)].end(),
                                              all.begin() + h * rows, all.begin() + (h + 1) * rows);
      }
    } else {
      RETURN_IF_ERROR(decoder::CheckBf16(part.k(), {rows, d}, "K rows"));
      Append(part.k(), head.k);
    }
    if (want_ == Want::kScores) return absl::OkStatus();
    RETURN_IF_ERROR(decoder::CheckBf16(part.v(), {rows, d}, "V rows"));
    Append(part.v(), head.v);
    return absl::OkStatus();
  }

  const ContextInfo& context_;
  const int64_t group_;
  const Want want_;
  const RowRange zone_;
  std::vector<HeadResult> heads_;                        // [tokens, kv_heads]
  std::vector<std::vector<std::vector<float>>> scores_;  // [tokens, kv_heads][group]
};

class SessionHandle final : public Session {
 public:
  SessionHandle(std::shared_ptr<Store> store, std::unique_ptr<decoder::StoreClient> client,
                ContextInfo context, RowRange zone, int64_t max_fetch_rows)
      : store_(std::move(store)),
        client_(std::move(client)),
        context_(std::move(context)),
        zone_(zone),
        max_fetch_rows_(std::max<int64_t>(max_fetch_rows, context_.kv_heads)) {}

  const ContextInfo& context() const override { return context_; }
  int64_t zone_begin() const override { return zone_.begin; }
  int64_t zone_end() const override { return zone_.end; }

  Result<std::vector<HeadResult>> Ask(const Query& query) override {
    const absl::StatusOr<uint64_t> id = SendQuery(query);
    if (!id.ok()) return ToPublic(id.status());
    return ToPublic(Gather(*id));
  }
  Result<uint64_t> Send(const Query& query) override { return ToPublic(SendQuery(query)); }
  Result<std::vector<HeadResult>> Wait(uint64_t id) override { return ToPublic(Gather(id)); }
  Result<Rows> Fetch(int32_t layer, std::span<const int64_t> ids) override {
    return ToPublic(FetchAll(layer, ids));
  }

 private:
  struct Asked {
    int64_t tokens;
    Want want;
  };

  absl::Status CheckLayer(int32_t layer) const {
    if (layer >= 0 && layer < context_.layers) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("layer=", layer, " is outside [0, ", context_.layers, ")"));
  }

  absl::StatusOr<uint64_t> SendQuery(const Query& query) {
    RETURN_IF_ERROR(CheckLayer(query.layer));
    const int64_t per_token = int64_t{context_.q_heads} * context_.head_dim;
    const auto floats = static_cast<int64_t>(query.queries.size());
    if (floats == 0 || floats % per_token != 0) {
      return absl::InvalidArgumentError(absl::StrCat("queries: ", floats,
                                                     " numbers are not [tokens, ", context_.q_heads,
                                                     ", ", context_.head_dim, "]"));
    }
    v1::Query wire;
    wire.set_layer(static_cast<uint32_t>(query.layer));
    decoder::SetFloats(query.queries.data(),
                       {floats / per_token, context_.q_heads, context_.head_dim},
                       wire.mutable_queries());
    SetSelect(query.select, *wire.mutable_select());
    wire.set_want(WireWant(query.want));
    wire.set_estimate(query.estimate);
    ASSIGN_OR_RETURN(const decoder::RequestId id, client_->Send(std::move(wire)));
    asked_[id] = {floats / per_token, query.want};
    return id;
  }

  absl::StatusOr<std::vector<HeadResult>> Gather(uint64_t id) {
    const auto asked = asked_.find(id);
    if (asked == asked_.end()) {
      return absl::InvalidArgumentError(absl::StrCat("no query ", id, " is waited for"));
    }
    Gathered gathered(context_, asked->second.tokens, asked->second.want, zone_);
    asked_.erase(asked);
    for (bool last = false; !last;) {
      ASSIGN_OR_RETURN(const v1::SessionReply reply, client_->Next(id));
      last = reply.last();
      for (const v1::HeadResult& part : reply.query().heads()) {
        const absl::Status added = gathered.Add(part);
        if (added.ok()) continue;
        if (!last) client_->Forget(id);
        return added;
      }
    }
    return std::move(gathered).Finish();
  }

  absl::StatusOr<Rows> FetchAll(int32_t layer, std::span<const int64_t> ids) {
    RETURN_IF_ERROR(CheckLayer(layer));
    const size_t row = static_cast<size_t>(context_.head_dim);
    const size_t head = ids.size() * row;
    Rows rows;
    rows.k.resize(head * static_cast<size_t>(context_.kv_heads));
    rows.v.resize(rows.k.size());
    const auto at_once = static_cast<size_t>(max_fetch_rows_ / context_.kv_heads);
    for (size_t begin = 0; begin < ids.size(); begin += at_once) {
      const size_t count = std::min(at_once, ids.size() - begin);
      RETURN_IF_ERROR(FetchSome(layer, ids.subspan(begin, count), begin * row, head, rows));
    }
    return rows;
  }

  absl::Status FetchSome(int32_t layer, std::span<const int64_t> ids, size_t at, size_t head,
                         Rows& rows) {
    v1::FetchRows fetch;
    fetch.set_layer(static_cast<uint32_t>(layer));
    for (const int64_t id : ids) fetch.mutable_ids()->add_id(id);
    ASSIGN_OR_RETURN(const decoder::RequestId id, client_->Send(std::move(fetch)));
    const int64_t d = context_.head_dim;
    std::vector<int64_t> seen(static_cast<size_t>(context_.kv_heads), 0);
    for (bool last = false; !last;) {
      ASSIGN_OR_RETURN(const v1::SessionReply reply, client_->Next(id));
      last = reply.last();
      for (const auto& block : reply.fetch_rows().blocks()) {
        const int64_t count = decoder::Dimension(block.k(), 0);
        RETURN_IF_ERROR(decoder::CheckBf16(block.k(), {count, d}, "K rows"));
        RETURN_IF_ERROR(decoder::CheckBf16(block.v(), {count, d}, "V rows"));
        const size_t h = block.kv_head();
        if (h >= seen.size() || block.first() != seen[h] ||
            seen[h] + count > static_cast<int64_t>(ids.size())) {
          return absl::DataLossError(absl::StrCat("fetch: layer ", layer, ", kv_head ", h,
                                                  ": rows from ", block.first(),
                                                  " on do not continue what came before"));
        }
        const size_t to = h * head + at + static_cast<size_t>(block.first() * d);
        std::memcpy(rows.k.data() + to, block.k().data().data(), block.k().data().size());
        std::memcpy(rows.v.data() + to, block.v().data().data(), block.v().data().size());
        seen[h] += count;
      }
    }
    for (const int64_t count : seen) {
      if (count == static_cast<int64_t>(ids.size())) continue;
      return absl::DataLossError(absl::StrCat("fetch: ", count, " of ", ids.size(), " rows came"));
    }
    return absl::OkStatus();
  }

  const std::shared_ptr<Store> store_;
  const std::unique_ptr<decoder::StoreClient> client_;
  const ContextInfo context_;
  const RowRange zone_;
  const int64_t max_fetch_rows_;  // of one request, over its heads
  std::map<uint64_t, Asked> asked_;
};

absl::StatusOr<std::unique_ptr<Session>> OpenSession(std::shared_ptr<Store> store, v1::Open open,
                                                     const SessionOptions& options) {
  open.set_sink(options.sink);
  open.set_local(options.local);
  ASSIGN_OR_RETURN(std::unique_ptr<decoder::StoreClient> client,
                   StoreHandle::Of(*store).access()->NewClient(/*pool=*/nullptr));
  ASSIGN_OR_RETURN(const v1::OpenReply opened, client->Open(open));
  ContextInfo context = Describe(opened.manifest());
  if (context.layers < 1 || context.kv_heads < 1 || context.head_dim < 1 ||
      context.q_heads % context.kv_heads != 0) {
    return absl::DataLossError(absl::StrCat(
        "context \"", open.context(), "\": the store describes no attention: ", context.layers,
        " layers, ", context.q_heads, " q heads, ", context.kv_heads, " KV heads"));
  }
  return std::make_unique<SessionHandle>(std::move(store), std::move(client), std::move(context),
                                         RowRange{opened.zone_begin(), opened.zone_end()},
                                         opened.limits().max_fetch_rows());
}

absl::StatusOr<std::unique_ptr<Session>> OpenForModel(std::shared_ptr<Store> store,
                                                      const std::string& context,
                                                      const Model& model,
                                                      const SessionOptions& options) {
  if (store == nullptr) return absl::InvalidArgumentError("a session needs a store");
  v1::Open open;
  open.set_context(context);
  for (const auto& [name, value] : ModelHandle::Of(model).loaded()->checkpoint().fingerprint) {
    v1::Fingerprint::Field& field = *open.mutable_fingerprint()->add_fields();
    field.set_name(name);
    field.set_value(value);
  }
  return OpenSession(std::move(store), std::move(open), options);
}

// The engine vouches for its model: the context's own fingerprint is presented.
absl::StatusOr<std::unique_ptr<Session>> OpenForContent(std::shared_ptr<Store> store,
                                                        const std::string& context,
                                                        const std::string& content_id,
                                                        const SessionOptions& options) {
  if (store == nullptr) return absl::InvalidArgumentError("a session needs a store");
  constexpr size_t kDigits = 12;
  if (content_id.size() < kDigits) {
    return absl::InvalidArgumentError(absl::StrCat("content_id \"", content_id, "\" has ",
                                                   content_id.size(), " digits of at least ",
                                                   kDigits));
  }
  ASSIGN_OR_RETURN(const auto client, StoreHandle::Of(*store).access()->NewContextClient());
  ASSIGN_OR_RETURN(v1::Manifest manifest, client->Get(context));
  v1::Open open;
  open.set_context(context);
  open.set_content_id(content_id);
  *open.mutable_fingerprint() = std::move(*manifest.mutable_fingerprint());
  return OpenSession(std::move(store), std::move(open), options);
}

}  // namespace
}  // namespace library

inline namespace api {

Result<std::unique_ptr<Session>> Session::Open(std::shared_ptr<Store> store,
                                               const std::string& context, const Model& model,
                                               const SessionOptions& options) {
  return library::ToPublic(library::OpenForModel(std::move(store), context, model, options));
}

Result<std::unique_ptr<Session>> Session::OpenPinned(std::shared_ptr<Store> store,
                                                     const std::string& context,
                                                     const std::string& content_id,
                                                     const SessionOptions& options) {
  return library::ToPublic(library::OpenForContent(std::move(store), context, content_id, options));
}

}  // namespace api
}  // namespace carrel
