// What:   the program's subcommands. Each Add... declares one on the app, with its flags; when it
//         was chosen, its run function is left in `chosen`.
// Errors: a command returns a status; main prints it and chooses the exit code.
#pragma once

#include <functional>

#include "absl/status/status.h"

namespace CLI {
class App;
}

namespace carrel::tools {

using Run = std::function<absl::Status()>;

void AddPrefill(CLI::App& app, Run& chosen);
void AddReindex(CLI::App& app, Run& chosen);
void AddSynth(CLI::App& app, Run& chosen);
void AddKeys(CLI::App& app, Run& chosen);  // new, hash, check
void AddServe(CLI::App& app, Run& chosen);
void AddStats(CLI::App& app, Run& chosen);
void AddApi(CLI::App& app, Run& chosen);
void AddAsk(CLI::App& app, Run& chosen);
void AddChat(CLI::App& app, Run& chosen);
void AddEval(CLI::App& app, Run& chosen);
void AddNeedle(CLI::App& app, Run& chosen);
void AddDoctor(CLI::App& app, Run& chosen);
void AddAudit(CLI::App& app, Run& chosen);
void AddVerify(CLI::App& app, Run& chosen);
void AddUpgrade(CLI::App& app, Run& chosen);
void AddExport(CLI::App& app, Run& chosen);
void AddImport(CLI::App& app, Run& chosen);
void AddJob(CLI::App& app, Run& chosen);  // submit, status, list, cancel
void AddWorker(CLI::App& app, Run& chosen);
void AddWarm(CLI::App& app, Run& chosen);
void AddBucket(CLI::App& app, Run& chosen);    // push, pull, gc
void AddContexts(CLI::App& app, Run& chosen);  // ls, inspect, rm

}  // namespace carrel::tools
