#include "serving/prefix_cache.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/hash/hash.h"
#include "common/checksum.h"

namespace carrel::serving {
namespace {

constexpr size_t kChunkBytes = 4096;  // of rows, that have a CRC

int64_t BytesOf(const std::vector<float>& rows) {
  return static_cast<int64_t>(rows.size() * sizeof(float));
}

// All of it, or false and errno. call: pread or pwrite.
template <typename Call, typename Bytes>
bool Whole(Call call, int fd, Bytes* data, int64_t bytes) {
  for (int64_t at = 0; at < bytes;) {
    const ssize_t n = call(fd, data + at, static_cast<size_t>(bytes - at), at);
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = EIO;  // the file is shorter, or takes nothing
    if (n <= 0) return false;
    at += n;
  }
  return true;
}

std::vector<uint32_t> CrcsOf(const std::vector<float>& rows) {
  const absl::string_view bytes(reinterpret_cast<const char*>(rows.data()),
                                static_cast<size_t>(BytesOf(rows)));
  std::vector<uint32_t> crcs((bytes.size() + kChunkBytes - 1) / kChunkBytes);
  Crc32cOfChunks(bytes, kChunkBytes, crcs.data());
  return crcs;
}

// The hash of the blocks so far, and of one more.
uint64_t Chain(uint64_t before, absl::Span<const TokenId> block) {
  return absl::HashOf(before, block);
}

}  // namespace

bool GoesOn(absl::Span<const TokenId> prompt, absl::Span<const TokenId> sequence,
            int64_t prompt_tokens) {
  const auto own = static_cast<size_t>(prompt_tokens);
  return own > 0 && own <= sequence.size() && prompt.size() > own &&
         std::equal(sequence.begin(), sequence.begin() + prompt_tokens, prompt.begin());
}

size_t CommonPrefix(absl::Span<const TokenId> a, absl::Span<const TokenId> b) {
  const size_t n = std::min(a.size(), b.size());
  return static_cast<size_t>(std::mismatch(a.begin(), a.begin() + n, b.begin()).first - a.begin());
}

std::optional<PrefixRest> RestOf(absl::Span<const TokenId> prompt,
                                 absl::Span<const TokenId> document, int64_t most_given_up) {
  if (prompt.empty()) return std::nullopt;
  const size_t same = std::min(CommonPrefix(prompt, document), prompt.size() - 1);
  const auto give_up = static_cast<int64_t>(document.size() - same);
  if (give_up > std::min(most_given_up, static_cast<int64_t>(PrefixCache::kSeam))) {
    return std::nullopt;
  }
  return PrefixRest{give_up, {prompt.begin() + static_cast<std::ptrdiff_t>(same), prompt.end()}};
}

// Rows in a file without a name.
class PrefixCache::File {
 public:
  // Null: they cannot be written; the log says why.
  static std::unique_ptr<File> Write(const std::string& folder, const std::vector<float>& rows) {
    std::unique_ptr<File> file(new File(folder, rows));
    const bool written =
        file->fd_ >= 0 &&
        Whole(pwrite, file->fd_, reinterpret_cast<const char*>(rows.data()), BytesOf(rows));
    if (written) return file;
    spdlog::warn("conversation: cannot be written to {}: {}; it is read again when it goes on",
                 folder, std::strerror(errno));
    return nullptr;
  }
  ~File() {
    if (fd_ >= 0) close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  // False: they cannot be read, or are others; the log says so.
  bool Read(std::vector<float>& rows) const {
    rows.resize(floats_);
    if (!Whole(pread, fd_, reinterpret_cast<char*>(rows.data()), BytesOf(rows))) {
      spdlog::warn("conversation: cannot be read from {}: {}; its prompt is read again", folder_,
                   std::strerror(errno));
      return false;
    }
    if (CrcsOf(rows) == crcs_) return true;
    spdlog::error(
        "conversation: its file in {} has other bytes than were written (CRC-32C); its "
        "prompt is read again",
        folder_);
    return false;
  }

 private:
  File(const std::string& folder, const std::vector<float>& rows)
      : folder_(folder),
        floats_(rows.size()),
        crcs_(CrcsOf(rows)),
        fd_(open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600)) {}

  const std::string folder_;
  const size_t floats_;
  const std::vector<uint32_t> crcs_;
  const int fd_;
};

PrefixCache::PrefixCache(PrefixCacheConfig config) : config_(std::move(config)) {}
PrefixCache::~PrefixCache() = default;

void PrefixCache::AddDocument(const std::string& content_id, absl::Span<const TokenId> document) {
  RemoveDocument(content_id);
  if (document.size() < kBlock + kSeam) return;
  uint64_t hash = 0;
  for (size_t at = 0; at + kBlock + kSeam <= document.size(); at += kBlock) {
    hash = Chain(hash, document.subspan(at, kBlock));
  }
  absl::MutexLock lock(&mu_);
  documents_.insert({hash, {content_id, document.size()}});
}

void PrefixCache::RemoveDocument(const std::string& content_id) {
  absl::MutexLock lock(&mu_);
  std::erase_if(documents_,
                [&](const auto& entry) { return entry.second.content_id == content_id; });
}

std::vector<std::string> PrefixCache::DocumentsOf(absl::Span<const TokenId> prompt) const {
  std::vector<Document> found;
  {
    absl::MutexLock lock(&mu_);
    uint64_t hash = 0;
    for (size_t at = 0; at + kBlock <= prompt.size(); at += kBlock) {
      hash = Chain(hash, prompt.subspan(at, kBlock));
      const auto [first, last] = documents_.equal_range(hash);
      for (auto it = first; it != last; ++it) found.push_back(it->second);
    }
  }
  std::stable_sort(found.begin(), found.end(),
                   [](const Document& a, const Document& b) { return a.tokens > b.tokens; });
  std::vector<std::string> content_ids;
  for (Document& document : found) content_ids.push_back(std::move(document.content_id));
  return content_ids;
}

int64_t PrefixCache::in_memory() const {
  absl::MutexLock lock(&mu_);
  return std::count_if(kept_.begin(), kept_.end(),
                       [](const Entry& kept) { return kept->file == nullptr; });
}

int64_t PrefixCache::in_files() const {
  absl::MutexLock lock(&mu_);
  return std::count_if(kept_.begin(), kept_.end(),
                       [](const Entry& kept) { return kept->file != nullptr; });
}

int64_t PrefixCache::BytesInMemoryLocked() const {
  int64_t bytes = 0;
  for (const Entry& kept : kept_) bytes += BytesOf(kept->conversation.sequence.rows);
  return bytes;
}

std::list<PrefixCache::Entry>::iterator PrefixCache::FindLocked(const SequenceOwner& owner,
                                                                absl::Span<const TokenId> prompt) {
  auto best = kept_.end();
  for (auto kept = kept_.begin(); kept != kept_.end(); ++kept) {
    const Conversation& one = (*kept)->conversation;
    if (!(one.owner == owner) || !GoesOn(prompt, one.sequence.tokens, one.prompt_tokens)) continue;
    if (best == kept_.end() || one.prompt_tokens > (*best)->conversation.prompt_tokens) best = kept;
  }
  return best;
}

PrefixCache::Taken PrefixCache::TakeFromMemory(const SequenceOwner& owner,
                                               absl::Span<const TokenId> prompt) {
  absl::MutexLock lock(&mu_);
  const auto found = FindLocked(owner, prompt);
  if (found == kept_.end()) return {};
  Kept& kept = **found;
  if (kept.file != nullptr || kept.being_written) return {.in_file = true};
  Taken taken{.conversation = std::move(kept.conversation)};
  kept_.erase(found);
  return taken;
}

std::optional<Conversation> PrefixCache::Take(const SequenceOwner& owner,
                                              absl::Span<const TokenId> prompt) {
  Entry taken;
  {
    absl::MutexLock lock(&mu_);
    for (;;) {
      const auto found = FindLocked(owner, prompt);
      if (found == kept_.end()) return std::nullopt;
      taken = *found;
      if (!taken->being_written) {
        kept_.erase(found);
        break;
      }
      const auto written = [&taken] { return !taken->being_written; };
      mu_.Await(absl::Condition(&written));
    }
  }
  Conversation& conversation = taken->conversation;
  if (taken->file != nullptr && !taken->file->Read(conversation.sequence.rows)) return std::nullopt;
  return std::move(conversation);
}

bool PrefixCache::Put(Conversation conversation, absl::Time now) {
  if (config_.most == 0 || conversation.sequence.tokens.empty()) return false;
  auto put = std::make_shared<Kept>();
  put->conversation = std::move(conversation);
  put->used = now;
  std::list<Entry> dropped;  // destroyed without the lock
  absl::MutexLock lock(&mu_);
  kept_.push_front(std::move(put));
  while (static_cast<int64_t>(kept_.size()) > config_.most) {
    dropped.splice(dropped.end(), kept_, std::prev(kept_.end()));
  }
  int64_t bytes = BytesInMemoryLocked();
  for (auto kept = kept_.end(); bytes > config_.memory_bytes + kMostUnwritten;) {
    if (--kept == kept_.begin()) break;
    const int64_t its = BytesOf((*kept)->conversation.sequence.rows);
    if (its == 0 || (*kept)->being_written) continue;
    bytes -= its;
    const auto drop = kept++;
    dropped.splice(dropped.end(), kept_, drop);
  }
  return bytes > config_.memory_bytes;
}

PrefixCache::Entry PrefixCache::NextToWriteLocked(absl::Time now) {
  const bool too_much = BytesInMemoryLocked() > config_.memory_bytes;
  for (auto kept = kept_.rbegin(); kept != kept_.rend(); ++kept) {
    const bool wanted = too_much || now - (*kept)->used > config_.idle;
    if (wanted && (*kept)->file == nullptr && !(*kept)->being_written) return *kept;
  }
  return nullptr;
}

void PrefixCache::Sweep(absl::Time now) {
  for (;;) {
    Entry entry;
    {
      absl::MutexLock lock(&mu_);
      entry = NextToWriteLocked(now);
      if (entry == nullptr) return;
      entry->being_written = true;
    }
    std::vector<float>& rows = entry->conversation.sequence.rows;
    std::unique_ptr<File> file = File::Write(config_.folder, rows);
    std::vector<float> freed;  // without the lock
    absl::MutexLock lock(&mu_);
    freed.swap(rows);
    entry->file = std::move(file);
    entry->being_written = false;
    if (entry->file == nullptr) kept_.remove(entry);
  }
}

void PrefixCache::Forget(const std::string& context) {
  std::list<Entry> dropped;  // destroyed without the lock
  absl::MutexLock lock(&mu_);
  for (auto kept = kept_.begin(); kept != kept_.end();) {
    const auto next = std::next(kept);
    if ((*kept)->conversation.owner.context == context) dropped.splice(dropped.end(), kept_, kept);
    kept = next;
  }
}

}  // namespace carrel::serving
