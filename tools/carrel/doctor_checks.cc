#include "tools/carrel/doctor_checks.h"

#include <sys/statvfs.h>
#include <sys/timex.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <sstream>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/descriptor_limit.h"
#include "common/lab.h"
#include "common/machine_memory.h"
#include "common/progress.h"
#include "common/usable_cores.h"
#include "decoder/plan/rates.h"
#include "serving/chat_renderer.h"

namespace carrel::tools {
namespace {

constexpr int64_t kLeastFree = int64_t{2} << 30;
constexpr int64_t kGoodDescriptors = 4096;
constexpr int kProgramsYear = 2025;  // no clock that is right says less

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string FieldOf(const std::string& path, const std::string& name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!absl::StartsWith(line, name)) continue;
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 1));
    if (parts.size() == 2) return std::string(absl::StripAsciiWhitespace(parts[1]));
  }
  return "";
}

Finding Processor() {
  const int all = static_cast<int>(std::thread::hardware_concurrency()), usable = UsableCores();
  std::vector<std::string> sets;
  if (__builtin_cpu_supports("avx2")) sets.emplace_back("AVX2");
  if (__builtin_cpu_supports("avx512f")) sets.emplace_back("AVX-512");
  if (__builtin_cpu_supports("avx512vnni")) sets.emplace_back("VNNI");
  const std::string flags = absl::StrCat(" ", FieldOf("/proc/cpuinfo", "flags"), " ");
  if (absl::StrContains(flags, " amx_int8 ")) sets.emplace_back("AMX");
  std::string name = FieldOf("/proc/cpuinfo", "model name");
  Finding finding{
      "processor", Health::kGood,
      absl::StrCat(name.empty() ? "without a name" : name, ", ", usable, " of ", all, " cores, ",
                   sets.empty() ? "no wide vectors" : absl::StrJoin(sets, ", ")),
      ""};
  if (sets.empty()) {
    finding.health = Health::kAdvice;
    finding.advice = "without AVX2 everything takes several times as long: use a newer machine";
  } else if (usable < all) {
    finding.advice = "affinity or a control group allows fewer cores than there are";
  }
  return finding;
}

Finding Memory() {
  const int64_t all = MachineMemoryBytes();
  int64_t free = 0;
  std::istringstream(FieldOf("/proc/meminfo", "MemAvailable")) >> free;
  free = std::min(all, free * 1024);
  Finding finding{"memory", Health::kGood,
                  absl::StrCat(FormatBytes(all), ", ", FormatBytes(free), " of it free"), ""};
  if (free < kLeastFree) {
    finding.health = Health::kAdvice;
    finding.advice =
        "a model and a document's rows are mapped: end other programs, or take a smaller model";
  }
  return finding;
}

Finding Descriptors() {
  const absl::StatusOr<int64_t> limit = RaiseDescriptorLimit();
  if (!limit.ok()) {
    return {"descriptors", Health::kBad, std::string(limit.status().message()), "raise ulimit -n"};
  }
  Finding finding{"descriptors", Health::kGood, absl::StrCat(*limit, " at most"), ""};
  if (*limit < kGoodDescriptors) {
    finding.health = Health::kAdvice;
    finding.advice = absl::StrCat("a server of many clients wants ", kGoodDescriptors,
                                  ": ulimit -Hn, or LimitNOFILE= of its unit");
  }
  return finding;
}

Finding Disk(const std::string& folder) {
  std::string at = folder.empty() ? "." : folder;
  struct statvfs disk {};
  while (statvfs(at.c_str(), &disk) != 0) {  // a store that is yet to be made
    const size_t slash = at.find_last_of('/');
    at = slash == std::string::npos ? "." : slash == 0 ? "/" : at.substr(0, slash);
    if (at == "/" || at == ".") break;
  }
  if (statvfs(at.c_str(), &disk) != 0)
    return {"disk", Health::kBad, absl::StrCat(at, " cannot be looked at"),
            "name a folder that is there"};
  const auto free = static_cast<int64_t>(disk.f_bavail) * static_cast<int64_t>(disk.f_frsize);
  Finding finding{"disk", Health::kGood, absl::StrCat(FormatBytes(free), " free at ", at), ""};
  if ((disk.f_flag & ST_RDONLY) != 0) {
    finding.health = Health::kAdvice;
    finding.advice = "it is mounted read-only: contexts can be asked there and none be made";
  } else if (free < kLeastFree) {
    finding.health = Health::kAdvice;
    finding.advice =
        "a document of 30,000 tokens takes some 0.4 to 4 GB: carrel ls says what can go";
  }
  return finding;
}

Finding Clock() {
  const time_t now = time(nullptr);
  tm utc{};
  gmtime_r(&now, &utc);
  timex state{};
  const bool synchronised = adjtimex(&state) != TIME_ERROR;
  char text[32];
  strftime(text, sizeof(text), "%Y-%m-%d %H:%M UTC", &utc);
  Finding finding{
      "clock", Health::kGood,
      absl::StrCat(text, synchronised ? ", synchronised" : ", not known to be synchronised"), ""};
  if (utc.tm_year + 1900 < kProgramsYear) {
    finding.health = Health::kBad;
    finding.advice =
        "certificates and keys with dates will be refused: set the clock (timedatectl set-ntp "
        "true)";
  } else if (!synchronised) {
    finding.advice = "dates in logs may be off: timedatectl set-ntp true";
  }
  return finding;
}

// Chat templates are rendered by Python's jinja2 (serving/render_chat.py).
Finding Templates() {
  const std::string python = serving::kRendererPython;
  const int code = std::system((python + " -I -c 'import jinja2' >/dev/null 2>&1").c_str());
  if (code == 0) return {"chat templates", Health::kGood, python + " with jinja2", ""};
  return {
      "chat templates", Health::kAdvice, python + " cannot import jinja2",
      "chat and ask need it for a model's chat template: apt install python3-jinja2 (ask --raw and "
      "completions do without)"};
}

Finding Gpu(bool cuda) {
  const std::string driver = FirstLine("/proc/driver/nvidia/version");
  const bool there = access("/dev/nvidiactl", F_OK) == 0;
  const absl::StatusOr<std::string> name = decoder::GpuName();
  const absl::StatusOr<int64_t> bytes = decoder::GpuMemory();
  if (name.ok() && bytes.ok()) {
    return {"GPU", Health::kGood,
            absl::StrCat(*name, ", ", FormatBytes(*bytes), driver.empty() ? "" : ", ", driver), ""};
  }
  Finding finding{"GPU", cuda ? Health::kBad : Health::kGood,
                  there ? "there is one, which this program does not reach" : "none", ""};
  if (absl::IsFailedPrecondition(name.status())) {
    if (there || cuda)
      finding.advice = "this program was built without CUDA: ./run build gpu makes one with it";
  } else if (there || cuda) {
    finding.advice = std::string(name.status().message());
  }
  return finding;
}

}  // namespace

Finding HugePagesFinding(const std::string& enabled) {
  if (absl::StrContains(enabled, "[always]") || absl::StrContains(enabled, "[madvise]"))
    return {"huge pages", Health::kGood, enabled, ""};
  return {"huge pages", Health::kAdvice, enabled.empty() ? "the kernel has none" : enabled,
          "scans of long documents are up to a tenth faster with them: echo madvise > "
          "/sys/kernel/mm/transparent_hugepage/enabled"};
}

// What of the papers' methods and kinds this program has.
Finding Lab() {
  return {"lab", Health::kGood, HasLab() ? "built in" : "left out (built with CARREL_LAB=OFF)", ""};
}

std::vector<Finding> CheckInstallation(const std::string& folder, bool cuda) {
  return {Processor(),
          Memory(),
          HugePagesFinding(FirstLine("/sys/kernel/mm/transparent_hugepage/enabled")),
          Descriptors(),
          Disk(folder),
          Clock(),
          Templates(),
          Lab(),
          Gpu(cuda)};
}

}  // namespace carrel::tools
