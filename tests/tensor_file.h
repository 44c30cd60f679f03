// What: bytes of files, and a safetensors file taken apart: a test may change it and put it together again.
#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace carrel {

std::string ReadBytes(const std::string& path);
void WriteBytes(const std::string& path, absl::string_view bytes);

struct TensorFile {
  nlohmann::ordered_json header;
  std::string data;

  static TensorFile Read(const std::string& path);
  void Write(const std::string& path) const;
  absl::string_view Tensor(const std::string& name) const;
};

}  // namespace carrel
