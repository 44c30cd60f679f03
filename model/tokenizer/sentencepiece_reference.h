// What: the library's own decoding, with which the tests compare ours. Apart, because no file may
//       include both its header and Abseil. Tests only.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace carrel::model {

// Aborts if the library reports an error.
std::string SentencePieceReferenceDecode(std::string_view model, const std::vector<int>& ids);

}  // namespace carrel::model
