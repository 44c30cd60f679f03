// What:   a document becomes a context: the model runs over it once, and K, V, one index per layer
//         and KV head, and what fidelity needs are stored.
// Errors: AlreadyExists the name is taken; InvalidArgument the document (empty, or longer than the
//         model was trained for) or an option; Unavailable no GPU; ResourceExhausted disk or GPU
//         memory; Cancelled. After any of these, and after a crash, the same call goes on from the
//         last finished layer.
// Cost:   memory: 4 bytes * tokens * hidden size, and some 20 bytes * tokens * KV heads * head_dim.
// Example: carrel::PrefillOptions options;                                      // examples/01_prefill.cc
//          options.index = "code";
//          const auto report = carrel::Prefill(**model, *tokens, **store, "novel", options);
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "carrel/export.h"
#include "carrel/model.h"
#include "carrel/status.h"
#include "carrel/store.h"

namespace carrel {
inline namespace api {

enum class Device : uint8_t { kCpu = 0, kCuda = 1 };

struct PrefillOptions {
  std::string index = "flat";  // flat | int8 | code | auto
  Device device = Device::kCpu;
  int64_t gpu_memory = 0;  // bound on its bytes; 0: none
  bool restart = false;    // discard an interrupted prefill of this name
  // Of a store that was connected to: the folder where the context is made before it is sent. Kept
  // between attempts.
  std::string staging;
  // Told the share that is done, in [0, 1], and where it is, at most ten times a second, on the
  // calling thread.
  std::function<void(double share, const std::string& where)> progress;
  // Asked after every few hundred tokens of each layer, on the calling thread; false ends the
  // prefill (Cancelled).
  std::function<bool()> wanted;
  // Tokens that may come behind the document, as a chat's question does: what a fidelity promises is
  // measured on them, and nothing else of them is kept. The first 128 at most. None: plain questions;
  // empty: on the document's own tokens alone.
  std::optional<std::vector<Token>> probe;
};

struct PrefillReport {
  ContextInfo context;
  double seconds = 0;
  int32_t resumed_layers = 0;  // taken over from an interrupted prefill
};

// store: a folder opened with kReadWrite, or one connected to.
CARREL_API Result<PrefillReport> Prefill(Model& model, std::span<const Token> document,
                                         Store& store, const std::string& name,
                                         const PrefillOptions& options = {});

// Removes what an interrupted prefill of this name left, if there is any. FailedPrecondition: it is
// running. store: a folder opened with kReadWrite. (Store::Delete does it, too, where there is no
// context of the name.)
CARREL_API Status DiscardPrefill(Store& store, const std::string& name);

struct UnfinishedPrefill {
  std::string name;
  int64_t bytes = 0;
  int64_t touched_unix_s = 0;  // when something was last written
  bool running = false;
};
// What prefills left that did not end, by name: the same Prefill goes on with it.
CARREL_API Result<std::vector<UnfinishedPrefill>> ListUnfinished(Store& store);

}  // namespace api
}  // namespace carrel
