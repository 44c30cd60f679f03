#include "tests/tensor_file.h"

#include <sys/stat.h>

#include <cstring>
#include <fstream>
#include <sstream>

#include "common/status.h"
#include "gtest/gtest.h"

namespace carrel {

std::string ReadBytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  std::ostringstream bytes;
  bytes << file.rdbuf();
  return bytes.str();
}

void WriteBytes(const std::string& path, absl::string_view bytes) {
  (void)chmod(path.c_str(), 0600);  // what is published is read-only
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  ASSERT_TRUE(file.good()) << path;
}

TensorFile TensorFile::Read(const std::string& path) {
  const std::string bytes = ReadBytes(path);
  uint64_t header_bytes = 0;
  CARREL_CHECK(bytes.size() >= sizeof(header_bytes));
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  CARREL_CHECK(header_bytes <= bytes.size() - sizeof(header_bytes));
  const std::string text = bytes.substr(sizeof(header_bytes), header_bytes);
  return {nlohmann::ordered_json::parse(text), bytes.substr(sizeof(header_bytes) + header_bytes)};
}

void TensorFile::Write(const std::string& path) const {
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t header_bytes = text.size();
  std::string bytes(reinterpret_cast<const char*>(&header_bytes), sizeof(header_bytes));
  bytes += text;
  bytes += data;
  WriteBytes(path, bytes);
}

absl::string_view TensorFile::Tensor(const std::string& name) const {
  const auto offsets = header.at(name).at("data_offsets").get<std::vector<size_t>>();
  return absl::string_view(data).substr(offsets[0], offsets[1] - offsets[0]);
}

}  // namespace carrel
