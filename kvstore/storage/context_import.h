// What:   the import of a context into a folder of its own, file by file.
// Bytes:  FOLDER/ID, of the context's id in hexadecimal digits:
//           header       the stream's, as it came
//           NNNN.sst     a file that is whole, of the SHA-256 that followed it, and synced
//           NNNN.part    one on its way
//         FOLDER/ID.lock   held while it comes in
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvstore/format/context_id.h"
#include "kvstore/storage/context_stream.h"

namespace carrel::kvstore {

// What an import needs of its store.
struct ImportTarget {
  // OK if neither name nor id is there, and so many bytes of files may come.
  std::function<absl::Status(const std::string& name, ContextId id, int64_t bytes)> check_free;
  // What may stay beside it of imports that nobody works on, asked after check_free. Null: all.
  std::function<int64_t()> most_remains;
  // Publishes the files, of which every byte is verified first, under the manifest as it is.
  std::function<absl::StatusOr<v1::Manifest>(const std::string& name, const std::string& manifest,
                                             const std::vector<std::string>& files)>
      publish;
};

// folder: of all imports. name: what the context is to be called; empty: as the stream says.
std::unique_ptr<ContextImport> MakeContextImport(std::string folder, std::string name,
                                                 ImportTarget target);

}  // namespace carrel::kvstore
