// What:   which name stands for which context, as of a reading of the whole catalog: who looks for one context reads its
//         entry alone. It says nothing that an entry itself would not: whoever finds one reads it and compares the name.
// Threads: of its owner's.
// Cost:   some hundred bytes per context.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "kvstore/format/context_id.h"
#include "kvstore/storage/catalog.h"

namespace carrel::kvstore {

class CatalogNames {
 public:
  // All of a catalog's (ReadCatalog).
  explicit CatalogNames(const std::vector<CatalogEntry>& entries);

  std::optional<ContextId> Find(const std::string& name) const;
  // Also of a deleted context whose files are not freed: "#ID". Null: there is none of this id.
  const std::string* NameOf(ContextId id) const;
  // Whether each context's name is known: a name that is not found is then nobody's.
  bool complete() const { return complete_; }

  void Add(const std::string& name, ContextId id);
  void Remove(ContextId id);

 private:
  std::map<std::string, ContextId> ids_;
  std::map<ContextId, std::string> names_;
  bool complete_ = true;
};

}  // namespace carrel::kvstore
