#include "model/digest_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/checksum.h"
#include "common/file.h"

namespace carrel::model {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kNsPerSecond = 1'000'000'000;
// Coarser than the times of any file system that is in use.
constexpr int64_t kSettledNs = 2 * kNsPerSecond;
constexpr int64_t kMaxEntries = 1024;
constexpr char kSuffix[] = ".digest";
constexpr size_t kDigestChars = 64;

int64_t SystemNow() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec * kNsPerSecond + now.tv_nsec;
}

std::string Key(absl::string_view what, const ModelFiles& files) {
  std::string key = absl::StrCat("carrel digest 1\n", what, "\n");
  for (const auto& opened : files) {
    const FileIdentity& file = opened->opened_as();
    absl::StrAppend(&key, file.device, " ", file.inode, " ", file.size, " ", file.modified_ns, " ",
                    file.changed_ns, "\n");
  }
  return key;
}

bool IsDigest(absl::string_view text) {
  return text.size() == kDigestChars && std::all_of(text.begin(), text.end(), [](char c) {
           return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f');
         });
}

// Drops all entries if there are too many: they come back as they are needed.
void Prune(const std::string& folder) {
  std::error_code error;
  std::vector<fs::path> entries;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() == kSuffix) entries.push_back(it->path());
  }
  if (static_cast<int64_t>(entries.size()) < kMaxEntries) return;
  for (const fs::path& entry : entries) fs::remove(entry, error);
}

}  // namespace

DigestCache::DigestCache(std::string folder, std::function<int64_t()> now_ns)
    : folder_(std::move(folder)), now_ns_(now_ns ? std::move(now_ns) : SystemNow) {}

std::string DigestCache::DefaultFolder() {
  if (const char* given = std::getenv("CARREL_CACHE"); given != nullptr) return given;
  if (const char* caches = std::getenv("XDG_CACHE_HOME"); caches != nullptr && caches[0] == '/') {
    return absl::StrCat(caches, "/carrel");
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && home[0] == '/') {
    return absl::StrCat(home, "/.cache/carrel");
  }
  return "";
}

std::string DigestCache::Get(absl::string_view what, const ModelFiles& files,
                             absl::FunctionRef<std::string()> compute) const {
  if (folder_.empty() || files.empty()) return compute();
  const std::string key = Key(what, files);
  const std::string path = absl::StrCat(folder_, "/", Sha256Hex(key), kSuffix);
  if (std::optional<std::string> known = Read(path, key); known.has_value()) return *known;
  const int64_t begin = now_ns_();
  std::string digest = compute();
  const bool settled = std::all_of(files.begin(), files.end(), [&](const auto& file) {
    const absl::StatusOr<FileIdentity> now = file->Identify();
    return now.ok() && *now == file->opened_as() && file->CheckReadable().ok() &&
           now->changed_ns < begin - kSettledNs && now->modified_ns < begin - kSettledNs;
  });
  if (settled) Write(path, key, digest);
  return digest;
}

// An entry is the key, the digest, and the CRC of both.
std::optional<std::string> DigestCache::Read(const std::string& path, absl::string_view key) const {
  const absl::StatusOr<std::string> text = ReadFile(path);
  if (!text.ok() || text->size() < key.size() + kDigestChars) return std::nullopt;
  std::string digest = text->substr(key.size(), kDigestChars);
  const std::string body = absl::StrCat(key, digest);
  if (!IsDigest(digest) || *text != absl::StrCat(body, "\n", Crc32c(body), "\n")) {
    return std::nullopt;
  }
  return digest;
}

void DigestCache::Write(const std::string& path, absl::string_view key,
                        absl::string_view digest) const {
  std::error_code error;
  fs::create_directories(fs::path(folder_).parent_path(), error);
  (void)mkdir(folder_.c_str(), S_IRWXU);  // the user's own
  Prune(folder_);
  const std::string body = absl::StrCat(key, digest);
  // Another process may write the same entry: each under a name of its own, then renamed.
  const std::string own = absl::StrCat(path, ".", getpid());
  if (!WriteFileAtomically(own, absl::StrCat(body, "\n", Crc32c(body), "\n")).ok()) return;
  fs::rename(own, path, error);
  if (error) fs::remove(own, error);
}

}  // namespace carrel::model
