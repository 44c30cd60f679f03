#include "retrieval/session.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "carrel/retrieval.h"
#include "carrel/v1/context.pb.h"
#include "common/status.h"
#include "kvstore/service/context_client.h"
#include "library/handles.h"
#include "library/status.h"

namespace carrel {
namespace library {
namespace {

retrieval::Want Wanted(Want want) {
  constexpr retrieval::Want kWants[] = {retrieval::Want::kIds, retrieval::Want::kRows,
                                        retrieval::Want::kValues, retrieval::Want::kAttend};
  return kWants[std::min<size_t>(static_cast<size_t>(want), 3)];
}

select::Selection Selected(const Selection& selection) {
  if (const auto* top_k = std::get_if<TopK>(&selection)) return select::TopK{top_k->rows};
  if (const auto* range = std::get_if<Range>(&selection))
    return select::Range{range->below, range->max_rows};
  if (const auto* mass = std::get_if<Mass>(&selection))
    return select::Mass{mass->share, mass->max_rows};
  return select::All();
}

template <typename T>
void Append(const std::vector<const void*>& rows, int64_t head_dim, std::vector<T>& out) {
  const auto count = static_cast<size_t>(head_dim);
  for (const void* row : rows) {
    out.resize(out.size() + count);
    std::memcpy(out.data() + out.size() - count, row, count * sizeof(T));
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

  absl::Status Add(const retrieval::Piece& piece) {
    const int64_t i = piece.token * context_.kv_heads + piece.kv_head.value();
    if (piece.kv_head.value() >= context_.kv_heads || i >= static_cast<int64_t>(heads_.size())) {
      return absl::DataLossError(absl::StrCat("reply: token ", piece.token, ", kv_head ",
                                              piece.kv_head.value(), " were not asked for"));
    }
    HeadResult& head = heads_[static_cast<size_t>(i)];
    if (want_ != Want::kAttend) return AddRows(piece, head, scores_[static_cast<size_t>(i)]);
    if (piece.out.empty() || piece.lse.empty())
      return absl::DataLossError("reply: without out or lse");
    head.out.assign(piece.out.begin(), piece.out.end());
    head.lse.assign(piece.lse.begin(), piece.lse.end());
    return absl::OkStatus();
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
  // A head's rows may come in several parts.
  absl::Status AddRows(const retrieval::Piece& piece, HeadResult& head,
                       std::vector<std::vector<float>>& scores) const {
    const auto rows = static_cast<int64_t>(piece.ids.size());
    for (const Position id : piece.ids) {
      if (id >= zone_.begin && id < zone_.end) continue;
      return absl::DataLossError(absl::StrCat("reply: row ", id, " is outside the zone [",
                                              zone_.begin, ", ", zone_.end, ")"));
    }
    const auto lacks = [&](size_t count, int64_t expected, const char* what) {
      return absl::DataLossError(
          absl::StrCat("reply: ", count, " ", what, ", expected ", expected));
    };
    head.ids.insert(head.ids.end(), piece.ids.begin(), piece.ids.end());
    if (want_ != Want::kRows) {
      if (static_cast<int64_t>(piece.scores.size()) != group_ * rows)
        return lacks(piece.scores.size(), group_ * rows, "scores");
      for (int64_t h = 0; h < group_; ++h) {
        std::vector<float>& to = scores[static_cast<size_t>(h)];
        to.insert(to.end(), piece.scores.begin() + h * rows, piece.scores.begin() + (h + 1) * rows);
      }
    } else {
      if (static_cast<int64_t>(piece.k.size()) != rows)
        return lacks(piece.k.size(), rows, "K rows");
      Append(piece.k, context_.head_dim, head.k);
    }
    if (want_ == Want::kScores) return absl::OkStatus();
    if (static_cast<int64_t>(piece.v.size()) != rows) return lacks(piece.v.size(), rows, "V rows");
    Append(piece.v, context_.head_dim, head.v);
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
  SessionHandle(std::shared_ptr<Store> store, std::unique_ptr<retrieval::Session> client,
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
    retrieval::Query asked;
    asked.layer = Layer(query.layer);
    asked.tokens = floats / per_token;
    asked.queries.assign(query.queries.begin(), query.queries.end());
    asked.selection = Selected(query.select);
    asked.want = Wanted(query.want);
    asked.estimate = query.estimate;
    ASSIGN_OR_RETURN(const retrieval::RequestId id, client_->Send(std::move(asked)));
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
      ASSIGN_OR_RETURN(const retrieval::Part part, client_->Next(id));
      last = part.last;
      for (const retrieval::Piece& piece : part.pieces) {
        const absl::Status added = gathered.Add(piece);
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
    retrieval::Fetch fetch;
    fetch.layer = Layer(layer);
    fetch.by_ids = true;
    fetch.ids.assign(ids.begin(), ids.end());
    ASSIGN_OR_RETURN(const retrieval::RequestId id, client_->Send(std::move(fetch)));
    const size_t row_bytes = static_cast<size_t>(context_.head_dim) * sizeof(rows.k[0]);
    std::vector<int64_t> seen(static_cast<size_t>(context_.kv_heads), 0);
    for (bool last = false; !last;) {
      ASSIGN_OR_RETURN(const retrieval::Part part, client_->Next(id));
      last = part.last;
      for (const retrieval::Piece& piece : part.pieces) {
        const auto count = static_cast<int64_t>(piece.k.size());
        const auto h = static_cast<size_t>(piece.kv_head.value());
        if (h >= seen.size() || piece.first_row != seen[h] || piece.v.size() != piece.k.size() ||
            seen[h] + count > static_cast<int64_t>(ids.size())) {
          return absl::DataLossError(absl::StrCat("fetch: layer ", layer, ", kv_head ", h,
                                                  ": rows from ", piece.first_row,
                                                  " on do not continue what came before"));
        }
        const size_t to = h * head + at + static_cast<size_t>(piece.first_row * context_.head_dim);
        for (size_t j = 0; j < piece.k.size(); ++j) {
          const size_t row = to + j * static_cast<size_t>(context_.head_dim);
          std::memcpy(rows.k.data() + row, piece.k[j], row_bytes);
          std::memcpy(rows.v.data() + row, piece.v[j], row_bytes);
        }
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
  const std::unique_ptr<retrieval::Session> client_;
  const ContextInfo context_;
  const RowRange zone_;
  const int64_t max_fetch_rows_;  // of one request, over its heads
  std::map<uint64_t, Asked> asked_;
};

absl::StatusOr<std::unique_ptr<Session>> OpenSession(std::shared_ptr<Store> store,
                                                     retrieval::OpenRequest open,
                                                     const SessionOptions& options) {
  open.sink = options.sink;
  open.local = options.local;
  ASSIGN_OR_RETURN(std::unique_ptr<retrieval::Session> client,
                   StoreHandle::Of(*store).access()->NewClient(/*pool=*/nullptr));
  ASSIGN_OR_RETURN(const retrieval::Opened opened, client->Open(open));
  v1::Manifest manifest;
  ContextInfo context;
  if (manifest.ParseFromString(opened.manifest)) context = Describe(manifest);
  if (context.layers < 1 || context.kv_heads < 1 || context.head_dim < 1 ||
      context.q_heads % context.kv_heads != 0) {
    return absl::DataLossError(absl::StrCat(
        "context \"", open.context, "\": the store describes no attention: ", context.layers,
        " layers, ", context.q_heads, " q heads, ", context.kv_heads, " KV heads"));
  }
  return std::make_unique<SessionHandle>(std::move(store), std::move(client), std::move(context),
                                         opened.zone, opened.limits.max_fetch_rows);
}

absl::StatusOr<std::unique_ptr<Session>> OpenForModel(std::shared_ptr<Store> store,
                                                      const std::string& context,
                                                      const Model& model,
                                                      const SessionOptions& options) {
  if (store == nullptr) return absl::InvalidArgumentError("a session needs a store");
  return OpenSession(std::move(store),
                     {.context = context,
                      .fingerprint = ModelHandle::Of(model).loaded()->checkpoint().fingerprint},
                     options);
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
  ASSIGN_OR_RETURN(const v1::Manifest manifest, client->Get(context));
  retrieval::OpenRequest open{.context = context, .content_id = content_id};
  for (const auto& field : manifest.fingerprint().fields())
    open.fingerprint.emplace_back(field.name(), field.value());
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
