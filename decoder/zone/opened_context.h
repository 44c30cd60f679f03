// What:      an opened context, as a sequence and its zone take it: how to retrieve, what the store
//            said of the context, and whom to ask. Without a context: no tokens and no client.
// Ownership: client and pool outlive what is made of it; rows are shared.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/ids.h"
#include "common/thread_pool.h"
#include "decoder/config.h"
#include "decoder/select/host_rows.h"
#include "retrieval/session.h"

namespace carrel::decoder {

struct OpenedContext {
  RetrievalConfig config;                     // what was left to the context is decided
  std::vector<select::Selection> selections;  // [layers]: LayerSelections
  DeviceConfig device;
  std::string content_id;  // empty: it has none
  AttentionShape shape;
  int64_t tokens = 0;
  RowRange zone;
  bool has_summaries = false;  // at the store
  int64_t max_top_k = 0;       // the store's limits
  int64_t max_fetch_rows = 0;
  int64_t max_block = 1;                  // tokens of one query
  std::vector<std::vector<float>> drift;  // StoredDrift (runner/query_drift.h)
  retrieval::Session* client = nullptr;
  ThreadPool* pool = nullptr;
  std::shared_ptr<const HostRows> rows;  // where TakesHostRows and they can be had
};

}  // namespace carrel::decoder
