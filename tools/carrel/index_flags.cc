#include "tools/carrel/index_flags.h"

#include <CLI/CLI.hpp>

#include "common/status.h"

namespace carrel::tools {

void IndexFlags::Declare(CLI::App& command) {
  command
      .add_option(
          "--index", kind,
          "flat (exact) | code (binary codes) | hnsw (graph) | ivf (inverted lists) | graph "
          "(from sampled queries)")
      ->capture_default_str();
  command.add_option("--hnsw-m", params.m, "hnsw, graph: links per key")->capture_default_str();
  command.add_option("--hnsw-ef-construction", params.ef_construction, "hnsw: effort of building")
      ->capture_default_str();
  command.add_option("--code-bits", params.code_bits, "code: bits per key, 64, 128 or 256")
      ->capture_default_str();
  command.add_flag("--code-train", params.code_trained,
                   "code: learn the directions from the document's own queries and keys");
  command.add_option("--ivf-lists", params.ivf_lists, "ivf: lists; 0: 4 sqrt(tokens)")
      ->capture_default_str();
  command
      .add_option("--effort,--hnsw-ef-search", params.effort,
                  "default effort of searching. hnsw, graph: beam width; ivf: lists probed; code: "
                  "rows scored exactly; 0: the kind's default")
      ->capture_default_str();
}

absl::StatusOr<kvstore::IndexParams> IndexFlags::Resolve() const {
  kvstore::IndexParams resolved = params;
  ASSIGN_OR_RETURN(resolved.kind, kvstore::ParseIndexKind(kind));
  return resolved;
}

}  // namespace carrel::tools
