// What:   reads a part of a mapped file through the page cache, but not through the mapping: pages
//         that were not cached do not stay, so that who reads everything once drives nobody's pages
//         out.
// Errors: DataLoss (names file and offset): the disk's error, or the file ends before.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "common/mapped_file.h"

namespace carrel::kvstore {

// Fills `bytes` from `offset` of the file.
absl::Status ReadAside(const MappedFile& file, int64_t offset, std::string& bytes);

}  // namespace carrel::kvstore
