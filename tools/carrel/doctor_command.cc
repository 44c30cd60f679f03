// carrel doctor
#include <sys/statvfs.h>
#include <sys/timex.h>
#include <sys/wait.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/descriptor_limit.h"
#include "common/json.h"
#include "common/lab.h"
#include "common/machine_memory.h"
#include "common/progress.h"
#include "common/status.h"
#include "common/usable_cores.h"
#include "common/version.h"
#include "decoder/plan/plan.h"
#include "decoder/plan/rates.h"
#include "library/machine_rates.h"
#include "serving/chat_renderer.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/json_report.h"
#include "tools/carrel/known_names.h"
#include "tools/carrel/plan_flags.h"
#include "tools/carrel/report.h"
#include "tools/carrel/store_flags.h"

namespace carrel::tools {
namespace {

enum class Health : uint8_t { kGood = 0, kAdvice = 1, kBad = 2 };

struct Finding {
  std::string what;  // of what: "memory"
  Health health = Health::kGood;
  std::string seen;    // "23.5 GiB, 21.3 GiB of it free"
  std::string advice;  // one line; empty: none is needed
};

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

Finding HugePages() {
  const std::string enabled = FirstLine("/sys/kernel/mm/transparent_hugepage/enabled");
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

// Each finding says what there is, and where that is not enough what helps. folder: where contexts are kept, whose disk
// is looked at. cuda: whether a GPU is asked for. Milliseconds: one starts python3.
std::vector<Finding> CheckInstallation(const std::string& folder, bool cuda) {
  return {Processor(), Memory(),    HugePages(), Descriptors(), Disk(folder),
          Clock(),     Templates(), Lab(),       Gpu(cuda)};
}

struct DoctorFlags {
  StoreFlags store;
  std::string context;
  PlanFlags plan;
  bool json = false;
};

const char* HealthName(Health health) {
  static constexpr const char* kNames[] = {"good", "advice", "BAD"};
  return kNames[static_cast<size_t>(health)];
}

// What a layer's attention costs, each way, of a short and of a long zone.
std::string RatesTable(const decoder::Rates& rates) {
  constexpr double kShort = 2048, kLong = 32768, kChosen = 128;
  std::string table = absl::StrFormat("%-14s %14s %14s  %s\n", "a layer's zone", "2,048 rows",
                                      "32,768 rows", "rates");
  for (const decoder::Way& way : decoder::kWays) {
    const decoder::WayRate& rate = rates.of(way);
    if (rate.fixed == 0 && rate.zone_row == 0) continue;  // there is no such way on this device
    absl::StrAppendFormat(&table, "%-14s %11.1f us %11.1f us  %s\n", decoder::WayName(way),
                          1e6 * rate.Seconds(kShort, kChosen), 1e6 * rate.Seconds(kLong, kChosen),
                          rate.measured ? "measured" : "assumed");
  }
  return table;
}

nlohmann::json FindingsJson(const std::vector<Finding>& findings) {
  nlohmann::json all = nlohmann::json::array();
  for (const Finding& finding : findings) {
    nlohmann::json one = {
        {"what", finding.what}, {"health", HealthName(finding.health)}, {"seen", finding.seen}};
    if (!finding.advice.empty()) one["advice"] = finding.advice;
    all.push_back(std::move(one));
  }
  return all;
}

void PrintFindings(const std::vector<Finding>& findings) {
  for (const Finding& finding : findings) {
    absl::PrintF("%-7s %-15s %s\n", HealthName(finding.health), finding.what, finding.seen);
    if (!finding.advice.empty()) absl::PrintF("%-7s %-15s %s\n", "", "", finding.advice);
  }
}

absl::Status RunDoctor(const DoctorFlags& flags) {
  const bool stored = !flags.store.folder.empty() || !flags.store.server.empty();
  if (!flags.context.empty() && (flags.plan.model.empty() || !stored)) {
    return absl::InvalidArgumentError(
        "--context: its plan needs --model, and --store or --server, which hold it");
  }
  ASSIGN_OR_RETURN(const model::Device device, model::ParseDevice(flags.plan.device));
  const std::vector<Finding> findings =
      CheckInstallation(flags.store.folder, device == model::Device::kCuda);
  nlohmann::json json = {
      {"version", std::string(kVersion)}, {"lab", HasLab()}, {"findings", FindingsJson(findings)}};
  if (!flags.json) PrintFindings(findings);
  if (!flags.plan.model.empty()) {
    ASSIGN_OR_RETURN(std::shared_ptr<library::LoadedModel> model,
                     library::LoadedModel::Load(flags.plan.model, "", flags.plan.threads));
    std::string path;
    ASSIGN_OR_RETURN(
        const std::shared_ptr<const decoder::Rates> rates,
        library::MeasureMachine(device, model->checkpoint().config.shape, model->pool(), &path));
    ASSIGN_OR_RETURN(json["rates"], ParseJson(library::RatesToText(*rates), "rates"));
    json["rates_file"] = path;
    if (!flags.json) {
      absl::PrintF(
          "\n%s: %s\n%s", rates->machine,
          path.empty() ? "not kept, there is no cache folder" : absl::StrCat("kept in ", path),
          RatesTable(*rates));
    }
    if (!flags.context.empty()) {
      ASSIGN_OR_RETURN(const decoder::Plan plan,
                       PlanOf(flags.plan, flags.store, flags.context, std::move(model)));
      json["plan"] = PlanJson(plan);
      if (!flags.json) absl::PrintF("\n%s: %s", flags.context, decoder::PlanTable(plan));
    }
  } else if (!flags.json) {
    absl::PrintF(
        "\nWith --model its shape is measured on this machine; with --context, too, its plan is "
        "shown.\n");
  }
  if (flags.json) PrintJson(json);
  for (const Finding& finding : findings) {
    if (finding.health != Health::kBad) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(finding.what, ": ", finding.seen, "; ", finding.advice));
  }
  return absl::OkStatus();
}

}  // namespace

void AddDoctor(CLI::App& app, Run& chosen) {
  auto flags = std::make_shared<DoctorFlags>();
  CLI::App& command = *app.add_subcommand(
      "doctor",
      "Look at this machine: what is missing, how fast attention is here, what would be chosen");
  flags->store.Declare(command);
  command.add_option("--context", flags->context, "whose plan is shown");
  flags->plan.Declare(command);
  command.add_flag("--json", flags->json, "one JSON object");
  command.callback([flags, &chosen] {
    chosen = [flags] { return WithNames(RunDoctor(*flags), flags->store, flags->context); };
  });
}

}  // namespace carrel::tools
