// carrel export | import
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "carrel/v1/context.pb.h"
#include "common/file.h"
#include "common/progress.h"
#include "common/status.h"
#include "kvstore/storage/context_stream.h"
#include "library/move_context.h"
#include "library/store_access.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/json_report.h"
#include "tools/carrel/known_names.h"
#include "tools/carrel/store_flags.h"

namespace carrel::tools {
namespace {

struct TransferFlags {
  StoreFlags store;
  std::string name;  // export: the context; import: --as
  std::string file;  // "-": standard output or input
  bool quiet = false;
  bool json = false;
};

absl::Status ReportMoved(const TransferFlags& flags, const std::string& name,
                         const std::string& content_id, int64_t bytes, const char* what) {
  return Report(
      flags.json, {{"name", name}, {"content_id", content_id}, {"bytes", bytes}},
      absl::StrFormat("%s %s: %s, content id %s\n", what, name, FormatBytes(bytes), content_id));
}

Progress ProgressOf(const TransferFlags& flags) {
  return Progress(flags.quiet ? Progress::Mode::kQuiet : Progress::ModeFor(stderr));
}

absl::StatusOr<v1::Manifest> Send(library::StoreAccess& from, int fd, const std::string& path,
                                  const TransferFlags& flags, int64_t& sent) {
  Progress progress = ProgressOf(flags);
  const absl::StatusOr<v1::Manifest> manifest =
      library::ExportContext(from, flags.name, [&](absl::string_view piece, int64_t bytes) {
        sent += static_cast<int64_t>(piece.size());
        progress.Update(std::min(1.0, static_cast<double>(sent) / static_cast<double>(bytes)),
                        path);
        return WriteAll(fd, piece, absl::StrCat(path, ": write"));
      });
  progress.Clear();
  return manifest;
}

// FILE appears whole or not at all.
absl::Status RunExport(const TransferFlags& flags) {
  RETURN_IF_ERROR(flags.store.Validate());
  ASSIGN_OR_RETURN(const std::unique_ptr<library::StoreAccess> from,
                   library::StoreAccess::Open(flags.store, kvstore::StoreMode::kReadOnly));
  int64_t sent = 0;
  if (flags.file == "-") {
    return Send(*from, STDOUT_FILENO, "standard output", flags, sent).status();
  }
  if (access(flags.file.c_str(), F_OK) == 0) {
    return absl::AlreadyExistsError(absl::StrCat(flags.file, " exists; remove it first"));
  }
  const std::string part = flags.file + ".part";
  const int fd = open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) return ErrnoStatus(errno, absl::StrCat(part, ": create"));
  const absl::Cleanup close_it = [fd] { close(fd); };
  const absl::StatusOr<v1::Manifest> manifest = Send(*from, fd, flags.file, flags, sent);
  absl::Status status = manifest.status();
  if (status.ok() && fsync(fd) != 0) status = ErrnoStatus(errno, absl::StrCat(part, ": fsync"));
  if (status.ok() && rename(part.c_str(), flags.file.c_str()) != 0) {
    status = ErrnoStatus(errno, flags.file);
  }
  if (!status.ok()) {
    unlink(part.c_str());
    return status;
  }
  return ReportMoved(flags, manifest->name(), manifest->content_id(), sent, "exported");
}

// Bytes of a stream from any offset on: a file is read there, a pipe read on until there.
class StreamSource {
 public:
  StreamSource(int fd, std::string path)
      : fd_(fd), path_(std::move(path)), seeks_(lseek(fd, 0, SEEK_CUR) >= 0) {}

  // Valid until the next call; empty: the stream has ended.
  absl::StatusOr<absl::string_view> At(int64_t offset) {
    if (seeks_) {
      RETURN_IF_ERROR(Read(offset));
      return absl::string_view(buffer_.data(), static_cast<size_t>(read_));
    }
    while (at_ + read_ <= offset) {
      at_ += read_;
      RETURN_IF_ERROR(Read(-1));
      if (read_ == 0) return absl::string_view();
    }
    return absl::string_view(buffer_.data(), static_cast<size_t>(read_))
        .substr(static_cast<size_t>(offset - at_));
  }

 private:
  absl::Status Read(int64_t offset) {
    for (;;) {
      read_ = offset < 0 ? read(fd_, buffer_.data(), buffer_.size())
                         : pread(fd_, buffer_.data(), buffer_.size(), offset);
      if (read_ >= 0) return absl::OkStatus();
      if (errno != EINTR) return ErrnoStatus(errno, absl::StrCat(path_, ": read"));
    }
  }

  const int fd_;
  const std::string path_;
  const bool seeks_;
  std::string buffer_ = std::string(kvstore::kStreamPieceBytes, '\0');
  int64_t at_ = 0;  // offset of the buffer's beginning, of a pipe
  ssize_t read_ = 0;
};

absl::Status RunImport(const TransferFlags& flags) {
  RETURN_IF_ERROR(flags.store.Validate());
  const bool from_file = flags.file != "-";
  const std::string path = from_file ? flags.file : "standard input";
  const int fd = from_file ? open(flags.file.c_str(), O_RDONLY | O_CLOEXEC) : STDIN_FILENO;
  if (fd < 0) return ErrnoStatus(errno, flags.file);
  const absl::Cleanup close_it = [fd, from_file] {
    if (from_file) close(fd);
  };
  ASSIGN_OR_RETURN(const std::unique_ptr<library::StoreAccess> into,
                   library::StoreAccess::Open(flags.store, kvstore::StoreMode::kReadWrite));
  StreamSource source(fd, path);
  Progress progress = ProgressOf(flags);
  const absl::StatusOr<v1::ImportReply> imported = library::ImportContext(
      *into, flags.name, [&](int64_t offset) { return source.At(offset); },
      [&](int64_t position, int64_t bytes) {
        if (bytes > 0) progress.Update(static_cast<double>(position) / bytes, path);
      });
  progress.Clear();
  if (!imported.ok()) return Annotate(imported.status(), path);
  return ReportMoved(flags, imported->name(), imported->content_id(), imported->bytes(),
                     "imported");
}

CLI::App& Declare(CLI::App& app, const char* name, const char* description,
                  const std::shared_ptr<TransferFlags>& flags) {
  CLI::App& command = *app.add_subcommand(name, description);
  flags->store.Declare(command);
  command.add_flag("--quiet", flags->quiet, "no progress");
  command.add_flag("--json", flags->json, "report as one JSON object");
  return command;
}

}  // namespace

void AddExport(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<TransferFlags>();
  CLI::App& command =
      Declare(app, "export", "Write a context as one stream, for another store or a backup", flags);
  command.add_option("NAME", flags->name, "the context")->required();
  command.add_option("FILE", flags->file, "a new file; - is standard output")->required();
  command.callback([flags, &chosen] {
    chosen = [flags] { return WithNames(RunExport(*flags), flags->store, flags->name); };
  });
}

void AddImport(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<TransferFlags>();
  CLI::App& command = Declare(app, "import",
                              "Take in what export wrote: verified before it is visible; once "
                              "interrupted, the same command goes on",
                              flags);
  command.add_option("FILE", flags->file, "what export wrote; - is standard input")->required();
  command.add_option("--as", flags->name, "name of the context here; by default as it was");
  command.callback([flags, &chosen] { chosen = [flags] { return RunImport(*flags); }; });
}

}  // namespace carrel::tools
