// What: another process running one disabled test of this test program: for locks and for kill -9.
//       (A forked child would share RocksDB's threads in name only.) Tests only.
#pragma once

#include <sys/types.h>

#include <string>

namespace carrel::kvstore {

class ChildProcess {
 public:
  // test: "Suite.DISABLED_Name"; folder: what ChildFolder() returns there.
  ChildProcess(const std::string& test, const std::string& folder);
  ~ChildProcess();  // kills it
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;
  // SIGKILL, then waits until it is gone. True if it was still running.
  bool Kill();

 private:
  pid_t pid_ = -1;
};

// In the child: the folder to work in. Empty if the test was started by hand.
std::string ChildFolder();

// Waits up to a minute for the file; false if it does not come.
bool WaitForFile(const std::string& path);

}  // namespace carrel::kvstore
