// What:    answers from a context: a model continues the document with a prompt, attending to a
//          window and to what it retrieves.
// Errors:  FailedPrecondition the context was computed by another model (names every difference);
//          NotFound no such context; InvalidArgument an option or prompt; DataLoss what was read is
//          damaged or changed meanwhile: there is no answer then, not a wrong one.
// Threads: one at a time per reader; many readers of one model and store beside each other. on_text is called on a thread
//          of the library, while Generate waits.
// Example: const auto reader = carrel::Reader::Open(*model, *store, "novel");    // examples/02_ask.cc
//          const auto answer = (*reader)->Generate("Who is Ada?", options);
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "carrel/export.h"
#include "carrel/model.h"
#include "carrel/prefill.h"
#include "carrel/status.h"
#include "carrel/store.h"

namespace carrel {
inline namespace api {

// How near to dense attention; each KV head gets the rows that reach it by what prefill measured.
enum class Fidelity : uint8_t { kFast = 0, kBalanced = 1, kFaithful = 2 };

// Where the zone is searched.
enum class Zone : uint8_t {
  kStore = 0,   // the store
  kHost = 1,    // this process, in the mapped rows of a store's folder: looks at every row
  kDevice = 2,  // the GPU, which holds all rows
  kAuto =
      3,  // what takes the least time on this machine, of what keeps the fidelity and fits into memory
};

inline constexpr int64_t kAllRows = -1;  // dense attention

struct ReaderOptions {
  Fidelity fidelity = Fidelity::kBalanced;
  std::optional<double> target_error;  // instead: mean error of attention outputs, relative
  std::optional<int64_t> top_k;        // instead: rows per KV head and token, or kAllRows
  Zone zone = Zone::kAuto;
  Device device = Device::kCpu;
  int64_t gpu_memory = 0;  // bound on its bytes; 0: none
  std::string content_id;  // what the context must hold, or its first 12 digits or more; empty: any
  // Also weights that can be shown to be made from those that computed the context (quantised, say).
  bool derived_weights = false;
};

struct GenerateOptions {
  int64_t max_tokens = 64;
  double temperature = 0;  // 0: greedy
  double top_p = 1;
  uint64_t seed = 0;
  // Told each piece of text as soon as it is certain; false ends the answer (Cancelled).
  std::function<bool(std::string_view)> on_text;
};

enum class StopReason : uint8_t { kEos = 0, kMaxTokens = 1, kContextLength = 2 };

struct Answer {
  std::string text;  // empty if the model has no tokenizer
  std::vector<Token> tokens;
  StopReason stop = StopReason::kMaxTokens;
  double prompt_seconds = 0;
  double generate_seconds = 0;
};

struct ReaderStatistics {
  int64_t context_tokens = 0;
  double rows_attended = 0;    // of the zone, mean over tokens, layers and KV heads
  double promised_error = 0;   // 0: rows were chosen by number
  int64_t bytes_received = 0;  // from the store
};

class CARREL_API Reader {
 public:
  static Result<std::unique_ptr<Reader>> Open(std::shared_ptr<Model> model,
                                              std::shared_ptr<Store> store,
                                              const std::string& context,
                                              const ReaderOptions& options = {});
  virtual ~Reader() = default;

  // Each call starts from the document anew. Of a text, document and prompt have the tokens of the whole,
  // where that can be; tokens follow the document as they are.
  virtual Result<Answer> Generate(std::string_view prompt, const GenerateOptions& options = {}) = 0;
  virtual Result<Answer> GenerateFrom(std::span<const Token> prompt,
                                      const GenerateOptions& options = {}) = 0;
  // Over all answers so far.
  virtual ReaderStatistics statistics() const = 0;
};

}  // namespace api
}  // namespace carrel
