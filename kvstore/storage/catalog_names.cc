#include "kvstore/storage/catalog_names.h"

namespace carrel::kvstore {

CatalogNames::CatalogNames(const std::vector<CatalogEntry>& entries) {
  for (const CatalogEntry& entry : entries) {
    names_.emplace(entry.id, entry.name);
    if (entry.hidden) continue;
    ids_.emplace(entry.name, entry.id);
    // Of another format version the name is known all the same.
    complete_ =
        complete_ && (entry.manifest.ok() || absl::IsFailedPrecondition(entry.manifest.status()));
  }
}

std::optional<ContextId> CatalogNames::Find(const std::string& name) const {
  const auto found = ids_.find(name);
  return found == ids_.end() ? std::nullopt : std::optional<ContextId>(found->second);
}

const std::string* CatalogNames::NameOf(ContextId id) const {
  const auto found = names_.find(id);
  return found == names_.end() ? nullptr : &found->second;
}

void CatalogNames::Add(const std::string& name, ContextId id) {
  ids_.insert_or_assign(name, id);
  names_.insert_or_assign(id, name);
}

void CatalogNames::Remove(ContextId id) {
  const auto found = names_.find(id);
  if (found == names_.end()) return;
  ids_.erase(found->second);
  names_.erase(found);
}

}  // namespace carrel::kvstore
