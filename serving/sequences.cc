#include "serving/sequences.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>
#include <utility>

#include "common/checksum.h"

namespace carrel::serving {
namespace {

int64_t BytesOf(const decoder::Sequence& sequence) {
  return static_cast<int64_t>(sequence.rows.size() * sizeof(float));
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

}  // namespace

bool GoesOn(absl::Span<const TokenId> prompt, absl::Span<const TokenId> sequence,
            int64_t prompt_tokens) {
  const auto own = static_cast<size_t>(prompt_tokens);
  return own > 0 && own <= sequence.size() && prompt.size() > own &&
         std::equal(sequence.begin(), sequence.begin() + prompt_tokens, prompt.begin());
}

Sequences::~Sequences() {
  for (Kept& kept : kept_) Close(kept);
}

void Sequences::Close(Kept& kept) const {
  if (kept.fd >= 0) close(kept.fd);
  kept.fd = -1;
}

int64_t Sequences::in_memory() const {
  return std::count_if(kept_.begin(), kept_.end(), [](const Kept& kept) { return kept.fd < 0; });
}

int64_t Sequences::bytes_in_memory() const {
  int64_t bytes = 0;
  for (const Kept& kept : kept_) bytes += BytesOf(kept.conversation.sequence);
  return bytes;
}

std::vector<uint32_t> Sequences::CrcsOf(const decoder::Sequence& sequence) {
  const absl::string_view bytes(reinterpret_cast<const char*>(sequence.rows.data()),
                                static_cast<size_t>(BytesOf(sequence)));
  std::vector<uint32_t> crcs((bytes.size() + kChunkBytes - 1) / kChunkBytes);
  Crc32cOfChunks(bytes, kChunkBytes, crcs.data());
  return crcs;
}

bool Sequences::WriteOut(Kept& kept) const {
  std::vector<float>& rows = kept.conversation.sequence.rows;
  kept.crcs = CrcsOf(kept.conversation.sequence);
  kept.floats = static_cast<int64_t>(rows.size());
  kept.fd = open(config_.folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  const bool written =
      kept.fd >= 0 && Whole(pwrite, kept.fd, reinterpret_cast<const char*>(rows.data()),
                            BytesOf(kept.conversation.sequence));
  if (!written) {
    spdlog::warn("conversation: cannot be written to {}: {}; it is read again when it goes on",
                 config_.folder, std::strerror(errno));
    Close(kept);
  }
  std::vector<float>().swap(rows);
  return written;
}

bool Sequences::ReadBack(Kept& kept) const {
  if (kept.fd < 0) return true;
  std::vector<float>& rows = kept.conversation.sequence.rows;
  rows.resize(static_cast<size_t>(kept.floats));
  const bool read = Whole(pread, kept.fd, reinterpret_cast<char*>(rows.data()),
                          BytesOf(kept.conversation.sequence));
  if (!read) {
    spdlog::warn("conversation: cannot be read from {}: {}; its prompt is read again",
                 config_.folder, std::strerror(errno));
  }
  const bool same = read && CrcsOf(kept.conversation.sequence) == kept.crcs;
  if (read && !same) {
    spdlog::error(
        "conversation: its file in {} has other bytes than were written (CRC-32C); its "
        "prompt is read again",
        config_.folder);
  }
  Close(kept);
  return same;
}

std::optional<Conversation> Sequences::Take(const SequenceOwner& owner,
                                            absl::Span<const TokenId> prompt) {
  auto best = kept_.end();
  for (auto kept = kept_.begin(); kept != kept_.end(); ++kept) {
    const Conversation& one = kept->conversation;
    if (!(one.owner == owner) || !GoesOn(prompt, one.sequence.tokens, one.prompt_tokens)) continue;
    if (best == kept_.end() || one.prompt_tokens > best->conversation.prompt_tokens) best = kept;
  }
  if (best == kept_.end()) return std::nullopt;
  std::list<Kept> taken;
  taken.splice(taken.end(), kept_, best);
  if (!ReadBack(taken.front())) return std::nullopt;
  return std::move(taken.front().conversation);
}

void Sequences::Put(Conversation conversation, absl::Time now) {
  if (config_.most == 0 || conversation.sequence.tokens.empty()) return;
  kept_.push_front({.conversation = std::move(conversation), .used = now});
  while (static_cast<int64_t>(kept_.size()) > config_.most) {
    Close(kept_.back());
    kept_.pop_back();
  }
  for (auto kept = kept_.end();
       kept != kept_.begin() && bytes_in_memory() > config_.memory_bytes;) {
    --kept;
    if (kept->fd >= 0) continue;
    if (!WriteOut(*kept)) kept = kept_.erase(kept);
  }
}

void Sequences::Sweep(absl::Time now) {
  for (auto kept = kept_.begin(); kept != kept_.end();) {
    const bool lost = kept->fd < 0 && now - kept->used > config_.idle && !WriteOut(*kept);
    kept = lost ? kept_.erase(kept) : std::next(kept);
  }
}

void Sequences::Forget(const std::string& context) {
  for (auto kept = kept_.begin(); kept != kept_.end();) {
    const bool of_it = kept->conversation.owner.context == context;
    if (of_it) Close(*kept);
    kept = of_it ? kept_.erase(kept) : std::next(kept);
  }
}

}  // namespace carrel::serving
