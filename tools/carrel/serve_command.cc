#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "common/status.h"
#include "kvstore/engine/engine.h"
#include "kvstore/service/server.h"
#include "kvstore/storage/store.h"
#include "tools/carrel/commands.h"

namespace carrel::tools {
namespace {

struct ServeFlags {
  std::string folder;
  std::vector<std::string> listen = {"127.0.0.1:7070"};
  int64_t memory_mib = 2048;
  double drain_seconds = 30;
  kvstore::EngineConfig engine;
};
