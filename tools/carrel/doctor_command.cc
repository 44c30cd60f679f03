// carrel doctor
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/json.h"
#include "common/lab.h"
#include "common/status.h"
#include "common/version.h"
#include "decoder/plan/plan.h"
#include "library/machine_rates.h"
#include "tools/carrel/commands.h"
#include "tools/carrel/doctor_checks.h"
#include "tools/carrel/json_report.h"
#include "tools/carrel/known_names.h"
#include "tools/carrel/plan_flags.h"
#include "tools/carrel/report.h"
#include "tools/carrel/store_flags.h"

namespace carrel::tools {
namespace {

struct DoctorFlags {
  StoreFlags store;
  std::string context;
  PlanFlags plan;
  bool json = false;
};

const char* HealthName(Health health) {
  switch (health) {
    case Health::kGood:
      return "good";
    case Health::kAdvice:
      return "advice";
    case Health::kBad:
      return "BAD";
  }
  return "";
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
