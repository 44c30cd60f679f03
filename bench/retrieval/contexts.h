// What:   the contexts that are measured: found in a store, or made into the benchmark's own.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "common/thread_pool.h"

namespace carrel::bench {

struct WantedContext {
  std::string store_folder, name;
  int32_t as_layers = 0;  // times are scaled to so many layers; 0: those of the context
  bool demo = false;      // of the demo model's document of that name; else made by synth
  int64_t tokens = 0;     // of synth
  int32_t layers = 0;     // of synth, of the 8B shape (8 KV heads, 32 q heads, head_dim 128);
                          // 0: the shape of registry-8k
  bool own = false;       // ours to make; otherwise it must be there
};

// Whether registry-*.txt or .txt.gz of that name is in docs, models/demo/docs or
// $CARREL_SHARED/demo/docs.
bool HaveDocument(const std::string& docs, const std::string& name);

// Makes the context if it is ours and absent.
absl::Status MakeIfAbsent(const WantedContext& wanted, const std::string& docs, ThreadPool& pool);

}  // namespace carrel::bench
