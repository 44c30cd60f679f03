// What:   what retrieval did and how good it was, per layer, over all tokens since the context was
//         opened. Every number is counted or measured.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "common/selection.h"

namespace carrel::decoder {

struct Mean {
  double sum = 0;
  int64_t count = 0;
  void Add(double x) {
    sum += x;
    ++count;
  }
  double value() const { return count == 0 ? 0 : sum / static_cast<double>(count); }
};

// Rows held near: a GPU's bank of a zone in host memory, or the row cache of a zone at the store.
// Counts over tokens and KV heads.
struct BankStatistics {
  int64_t slots = 0;       // per KV head; 0: rows are read where they lie
  int64_t wanted = 0;      // rows that tokens attended to, or that the store selected
  int64_t hits = 0;        // of them, in the bank already
  int64_t ahead = 0;       // rows asked for ahead, with predicted queries
  int64_t ahead_hits = 0;  // of them, in the bank already
  int64_t expected = 0;    // rows attended by tokens whose rows were asked for ahead
  int64_t foreseen = 0;    // of them, asked for ahead
};

struct LayerStatistics {
  int64_t tokens = 0;  // that passed the layer
  select::Selection selection = select::All();
  int64_t rows_attended = 0;  // zone rows, over tokens and KV heads
  // Of these, tokens of prompts that attend to every row in one pass where others choose (PromptRows), and their rows.
  int64_t whole_tokens = 0, whole_rows = 0;
  int64_t candidates = 0;  // rows scored exactly, here or at the store, over tokens and KV heads
  bool estimated = false;  // rows that were not attended counted through summaries
  int64_t visited =
      0;  // keys that the index or the selector looked at, over the q heads of a group too
  int64_t prefetched = 0;  // tokens whose candidates were asked ahead and used
  int64_t verified_again =
      0;  // tokens whose candidates were asked ahead and asked again with the true query
  double exposed_wait_us = 0;  // time that the layer stood still for the store
  int64_t bytes_received = 0;  // of replies, measurements excluded
  int64_t bytes_read =
      0;  // of a zone in this host's memory: to choose rows (not by a GPU), and the rows
  BankStatistics bank;
  Mean cosine;         // of approximate and true query, the least over q heads
  Mean hit_rate;       // measure: share of the true top_k among what was asked ahead
  Mean kept_rate;      // measure, values and attend: share of the true top_k that the true query
                       // chose of what was asked ahead
  Mean mass;           // measure: share of the zone's softmax that the attended zone rows carry
  Mean attended_mass;  // measure: share of the whole softmax (zone and window) that all attended
                       // rows carry
  Mean output_error;   // measure: per token, ||out - dense|| / ||dense|| of this layer's attention
                       // alone, the same queries seen
};

// [layers], of which nothing has passed.
std::vector<LayerStatistics> StatisticsOf(absl::Span<const select::Selection> selections);

// Zone rows that the layer's tokens attend to, over KV heads; of prompts that took all only where no other token
// passed. 0: none passed.
double RowsPerToken(const LayerStatistics& layer);

// A sequence's part of a question's tokens.
struct CountShare {
  LayerStatistics* statistics = nullptr;
  int64_t tokens = 0;
};

// What was counted in all[0] since `before`, for the tokens of all, becomes each one's part by its
// tokens; what is left over stays where it was counted. What is measured is not shared.
void ShareCounts(const LayerStatistics& before, absl::Span<const CountShare> all);

// What the error that a plan of rows promises was measured on.
enum class PromisedOn : uint8_t {
  kNothing = 0,    // rows were chosen by number, range or mass
  kWholeZone = 1,  // all rows are attended: there is no error
  kDocument = 2,   // the document's own queries alone, which questions are unlike
  kProbe = 3,      // queries of what may come behind the document, too
};

struct Statistics {
  std::vector<LayerStatistics> layers;
  double target_error = 0;    // aimed at; 0: rows were chosen by number, range or mass
  double promised_error = 0;  // by the rows chosen for it, as prefill measured them
  PromisedOn promised_on = PromisedOn::kNothing;
  int64_t bytes_sent = 0;
  int64_t bytes_received = 0;
  int64_t window_bytes = 0;
  int64_t device_bytes = 0;  // of a GPU's memory, weights included
  int64_t weight_bytes = 0;  // of them, weights
  int64_t shared_bytes = 0;  // of them, what other sequences use, too: weights, what steps need
};

// Adds another sequence's over the same context. Layers' numbers are added, but for what says how and slots; memory is,
// but for what is shared, which is counted once.
void AddStatistics(const Statistics& more, Statistics& sum);

}  // namespace carrel::decoder
