#include "tools/carrel/index_flags.h"

#include <CLI/CLI.hpp>

#include "common/lab.h"
#include "common/status.h"
#include "kvstore/index/index_spec.h"
#include "kvstore/index/index_type.h"
#include "tools/carrel/lab.h"

namespace carrel::tools {

void IndexFlags::Declare(CLI::App& command) {
  std::string lab;
  for (const kvstore::IndexKind of : kvstore::kAllIndexKinds) {
    const kvstore::IndexType& type = kvstore::IndexTypeOf(of);
    if (type.lab()) absl::StrAppend(&lab, lab.empty() ? "" : ", ", type.name());
  }
  command.add_option("--index", kind,
                     absl::StrCat("flat (exact) | int8 (8 bits, the best exactly) | code (binary "
                                  "codes) | auto (per head the cheapest that finds enough); of the "
                                  "lab",
                                  HasLab() ? ": " : ", which this carrel is without: ", lab));
  command.add_option(
      "--effort,--hnsw-ef-search", params.effort,
      "default effort of searching. hnsw, graph: beam width; ivf: lists probed; code, int8: "
      "rows scored exactly; 0: the kind's default");
  command.add_option("--hnsw-m", params.m, "hnsw, graph: links per key");
  command.add_option("--hnsw-ef-construction", params.ef_construction, "hnsw: effort of building");
  command.add_option("--code-bits", params.code_bits, "code: bits per key, 64, 128 or 256");
  command.add_option(
      "--code-train", code_train,
      "code: directions are random (off), or learned from the document's own queries "
      "and keys: in closed form (staged), or by HATA's gradient descent (hata)");
  command.add_option("--code-scan", code_scan,
                     "code: the query's numbers against the keys' bits (asymmetric), or its signs "
                     "(symmetric: faster and coarser)");
  command.add_option("--ivf-lists", params.ivf_lists, "ivf: lists; 0: 4 sqrt(tokens)");
  command.add_option("--auto-recall", automatic.want_recall,
                     "auto: recall that a head's index must reach on held-out queries");
  command.add_option("--auto-rows", automatic.wanted, "auto: rows of which it is the recall");
  MoveToLab(command, {"effort", "hnsw-m", "hnsw-ef-construction", "code-bits", "code-train",
                      "code-scan", "ivf-lists", "auto-recall", "auto-rows"});
}

absl::Status IndexFlags::Resolve() {
  ASSIGN_OR_RETURN(params.code_training, kvstore::ParseCodeTraining(code_train));
  ASSIGN_OR_RETURN(params.code_scan, kvstore::ParseCodeScan(code_scan));
  if (kind == kvstore::kAutoIndexKind) {
    automatic.params = params;
    auto_index = automatic;
    return kvstore::ValidateAutoIndexConfig(automatic);
  }
  absl::StatusOr<kvstore::IndexKind> parsed = kvstore::ParseIndexKind(kind);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(parsed.status().message(), ", auto"));
  }
  params.kind = *parsed;
  return kvstore::CheckIndexBuild(params);
}

}  // namespace carrel::tools
