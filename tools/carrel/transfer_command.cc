// carrel export | import
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "carrel/v1/context.pb.h"
#include "common/progress.h"
#include "common/status.h"
#include "kvstore/storage/store.h"
#include "tools/carrel/commands.h"

namespace carrel::tools {
namespace {

struct TransferFlags {
  std::string folder;
  std::string name;  // export: the context; import: --as
  std::string file;  // "-": standard output or input
  bool quiet = false;
  bool json = false;
};

absl::Status WriteAll(int fd, const std::string& path, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, absl::StrCat(path, ": write"));
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return absl::OkStatus();
}

void Report(const TransferFlags& flags, const v1::Manifest& manifest, int64_t bytes,
            const char* what) {
  if (flags.json) {
    std::printf("%s\n", nlohmann::json{{"name", manifest.name()},
                                       {"content_id", manifest.content_id()},
                                       {"bytes", bytes}}
                            .dump()
                            .c_str());
    return;
  }
  std::printf("%s %s: %s, content id %s\n", what, manifest.name().c_str(),
              FormatBytes(bytes).c_str(), manifest.content_id().c_str());
}

// The stream into an open file.
absl::Status Send(kvstore::ContextExport& from, int fd, const std::string& path,
                  Progress& progress) {
  for (int64_t sent = 0;;) {
    ASSIGN_OR_RETURN(const absl::string_view piece, from.Next());
    if (piece.empty()) return absl::OkStatus();
    RETURN_IF_ERROR(WriteAll(fd, path, piece));
    sent += static_cast<int64_t>(piece.size());
    progress.Update(static_cast<double>(sent) / static_cast<double>(from.bytes()), path);
  }
}

// FILE appears whole or not at all.
absl::Status RunExport(const TransferFlags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(flags.folder, kvstore::StoreMode::kReadOnly));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::ContextExport> from, store->Export(flags.name));
  Progress progress(flags.quiet ? Progress::Mode::kQuiet : Progress::ModeFor(stderr));
  if (flags.file == "-") {
    const absl::Status sent = Send(*from, STDOUT_FILENO, "standard output", progress);
    progress.Clear();
    return sent;
  }
  if (access(flags.file.c_str(), F_OK) == 0) {
    return absl::AlreadyExistsError(absl::StrCat(flags.file, " exists; remove it first"));
  }
  const std::string part = flags.file + ".part";
  const int fd = open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) return ErrnoStatus(errno, absl::StrCat(part, ": create"));
  const absl::Cleanup close_it = [fd] { close(fd); };
  absl::Status status = Send(*from, fd, flags.file, progress);
  progress.Clear();
  if (status.ok() && fsync(fd) != 0) status = ErrnoStatus(errno, absl::StrCat(part, ": fsync"));
  if (status.ok() && rename(part.c_str(), flags.file.c_str()) != 0) {
    status = ErrnoStatus(errno, flags.file);
  }
  if (!status.ok()) {
    unlink(part.c_str());
    return status;
  }
  Report(flags, from->manifest(), from->bytes(), "exported");
  return absl::OkStatus();
}

// Brings the stream where the import wants to go on: a file by seeking, else by reading on.
absl::Status Skip(int fd, const std::string& path, bool seeks, int64_t from, int64_t to) {
  if (seeks) {
    if (lseek(fd, to, SEEK_SET) == to) return absl::OkStatus();
    return ErrnoStatus(errno, absl::StrCat(path, ": seek to ", to));
  }
  std::string dropped(kvstore::kStreamPieceBytes, '\0');
  while (from < to) {
    const ssize_t n =
        read(fd, dropped.data(), std::min(dropped.size(), static_cast<size_t>(to - from)));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, absl::StrCat(path, ": read"));
    if (n == 0) return absl::DataLossError(absl::StrCat(path, " ends at ", from));
    from += n;
  }
  return absl::OkStatus();
}

absl::Status Receive(kvstore::ContextImport& to, int fd, const std::string& path,
                     Progress& progress) {
  const bool seeks = lseek(fd, 0, SEEK_CUR) >= 0;
  std::string buffer(kvstore::kStreamPieceBytes, '\0');
  int64_t at = 0;  // of the stream: how far it was read
  for (;;) {
    const ssize_t n = read(fd, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, absl::StrCat(path, ": read"));
    if (n == 0) return absl::OkStatus();
    at += n;
    absl::string_view rest(buffer.data(), static_cast<size_t>(n));
    for (;;) {
      RETURN_IF_ERROR(to.Take(rest));
      if (to.position() >= at) break;
      // What is here already was passed over; the end of what was read is new.
      rest = rest.substr(rest.size() - static_cast<size_t>(at - to.position()));
    }
    if (to.position() > at) {
      RETURN_IF_ERROR(Skip(fd, path, seeks, at, to.position()));
      at = to.position();
    }
    if (to.bytes() > 0) {
      progress.Update(static_cast<double>(at) / static_cast<double>(to.bytes()), path);
    }
  }
}

absl::Status RunImport(const TransferFlags& flags) {
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::Store> store,
                   kvstore::Store::Open(flags.folder, kvstore::StoreMode::kReadWrite));
  ASSIGN_OR_RETURN(const std::unique_ptr<kvstore::ContextImport> to, store->Import(flags.name));
  const bool from_file = flags.file != "-";
  const std::string path = from_file ? flags.file : "standard input";
  const int fd = from_file ? open(flags.file.c_str(), O_RDONLY | O_CLOEXEC) : STDIN_FILENO;
  if (fd < 0) return ErrnoStatus(errno, flags.file);
  const absl::Cleanup close_it = [fd, from_file] {
    if (from_file) close(fd);
  };
  Progress progress(flags.quiet ? Progress::Mode::kQuiet : Progress::ModeFor(stderr));
  const absl::Status received = Receive(*to, fd, path, progress);
  progress.Clear();
  RETURN_IF_ERROR(Annotate(received, path));
  ASSIGN_OR_RETURN(const v1::Manifest manifest, to->Publish());
  Report(flags, manifest, to->bytes(), "imported");
  return absl::OkStatus();
}

CLI::App& Declare(CLI::App& app, const char* name, const char* description,
                  const std::shared_ptr<TransferFlags>& flags) {
  CLI::App& command = *app.add_subcommand(name, description);
  command.add_option("--store", flags->folder, "folder of the store")->required();
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
  command.callback([flags, &chosen] { chosen = [flags] { return RunExport(*flags); }; });
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
