// What:    what an inference engine of one's own needs: top-k rows, or partial attention over the
//          zone, of one layer for its queries. The engine holds the first `sink` and last `local`
//          rows itself, and merges partial attention with its own (out and lse of both).
// Shapes:  queries [tokens, q_heads, head_dim] F32, after RoPE, row-major. Results: one per token
//          and KV head, token-major.
// Units:   scores are q k / sqrt(head_dim); lse is ln of the sum of their exponentials.
// Errors:  as reader.h; a call that fails leaves the session usable, unless it is Unavailable.
// Threads: one at a time per session; many sessions beside each other.
// Example: const auto session = carrel::Session::OpenPinned(*store, "novel", content_id);
//          const auto best = (*session)->Ask({.layer = 0, .queries = q, .select = carrel::TopK{8}});
//          // examples/04_query_rows.cc
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "carrel/export.h"
#include "carrel/model.h"
#include "carrel/status.h"
#include "carrel/store.h"

namespace carrel {
inline namespace api {

// Which rows of the zone, per KV head: the first that fits.
struct TopK {
  int64_t rows = 128;
};
struct All {};
struct Range {  // scores at most so far below the best of any q head
  float below = 0;
  int64_t max_rows = 0;  // 0: the store's bound
};
struct Mass {  // the best until each q head has this share of its softmax
  float share = 0;
  int64_t max_rows = 0;
};
using Selection = std::variant<TopK, All, Range, Mass>;

enum class Want : uint8_t {
  kScores = 0,  // ids and scores
  kRows = 1,    // ids, K and V
  kValues = 2,  // ids, scores and V
  kAttend = 3,  // partial attention
};

struct Query {
  int32_t layer = 0;
  std::span<const float> queries;  // must live until the call returns
  Selection select = TopK();
  Want want = Want::kAttend;
  // kAttend: rows that were not selected count through summaries of their clusters.
  bool estimate = false;
};

struct HeadResult {
  int32_t token = 0;
  int32_t kv_head = 0;
  std::vector<int64_t> ids;   // positions; kScores, kRows, kValues
  std::vector<float> scores;  // [group, ids]; kScores, kValues
  std::vector<uint16_t> k;    // bf16 [ids, head_dim]; kRows
  std::vector<uint16_t> v;    // bf16 [ids, head_dim]; kRows, kValues
  std::vector<float> out;     // [group, head_dim]; kAttend
  std::vector<float> lse;     // [group]; kAttend
};

struct Rows {
  std::vector<uint16_t> k, v;  // bf16 [kv_heads, ids, head_dim]
};

struct SessionOptions {
  int64_t sink = 4;    // first rows, which are the engine's
  int64_t local = 64;  // last rows, likewise
};

class CARREL_API Session {
 public:
  // model: checked against the one that computed the context.
  static Result<std::unique_ptr<Session>> Open(std::shared_ptr<Store> store,
                                               const std::string& context, const Model& model,
                                               const SessionOptions& options = {});
  // For an engine whose model is not loaded here, and which knows that the context is of it:
  // content_id names what it must hold (12 digits or more).
  static Result<std::unique_ptr<Session>> OpenPinned(std::shared_ptr<Store> store,
                                                     const std::string& context,
                                                     const std::string& content_id,
                                                     const SessionOptions& options = {});
  virtual ~Session() = default;

  virtual const ContextInfo& context() const = 0;  // stored_bytes is not told: 0
  virtual int64_t zone_begin() const = 0;          // the store searches rows [zone_begin, zone_end)
  virtual int64_t zone_end() const = 0;

  virtual Result<std::vector<HeadResult>> Ask(const Query& query) = 0;
  // The same in two steps: on its way now, waited for later, in any order. Each id is waited for once.
  virtual Result<uint64_t> Send(const Query& query) = 0;
  virtual Result<std::vector<HeadResult>> Wait(uint64_t id) = 0;
  // Rows of all KV heads by position, anywhere in the context.
  virtual Result<Rows> Fetch(int32_t layer, std::span<const int64_t> ids) = 0;
};

}  // namespace api
}  // namespace carrel
