"""Steps of somebody who uses the program: commands as they are typed, and what is expected of each. A step is right, or
its words help; all that is not as expected is told at the end."""
import contextlib
import os
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATIENCE = 240  # seconds, of a step; under a sanitizer, or beside other tests, all is slow


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Walk:
    """A folder with what a clone has: build/release/carrel, models, docs; `carrel` is on the PATH."""

    def __init__(self, name, program):
        self.name, self.failures, self.steps, self.servers = name, [], 0, []
        self.temporary = tempfile.TemporaryDirectory(prefix="carrel-walk-")
        self.folder = pathlib.Path(self.temporary.name)
        for there in ("models", "docs", "deploy"):
            (self.folder / there).symlink_to(ROOT / there)
        for link in ("build/release/carrel", "bin/carrel"):
            (self.folder / link).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / link).symlink_to(pathlib.Path(program).resolve())
        (self.folder / "out").mkdir()
        self.environment = {name: value for name, value in os.environ.items()
                            if not name.lower().endswith("_proxy") and not re.match(r"CARREL_(KEY|TLS|SERVE|API)_", name)}
        self.environment["PATH"] = f"{self.folder}/bin:{self.environment['PATH']}"
        self.environment["XDG_CACHE_HOME"] = str(self.folder / "cache")

    def path(self, name):
        return self.folder / name

    def write(self, name, content):
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def step(self, command, code=0, out=(), err=(), never=(), given=b"", environment=None):
        """Runs it in bash. out, err: texts that must stand there; never: that must stand nowhere."""
        self.steps += 1
        try:
            done = subprocess.run(["bash", "-c", command], cwd=self.folder, input=given, capture_output=True,
                                  env={**self.environment, **(environment or {})}, timeout=PATIENCE, check=False)
        except subprocess.TimeoutExpired:
            self.fail(command, f"still runs after {PATIENCE} s")
            return "", ""
        said, told = (stream.decode("utf-8", "replace") for stream in (done.stdout, done.stderr))
        wrong = [f"exit code {done.returncode}, expected {code}"] if done.returncode != code else []
        wrong += [f"standard output lacks {text!r}" for text in out if text not in said]
        wrong += [f"standard error lacks {text!r}" for text in err if text not in told]
        wrong += [f"{text!r} stands there" for text in never if text in said + told]
        if wrong:
            self.fail(command, "; ".join(wrong) + f"\n   standard output: {said[:1500]}\n   standard error: {told[:1500]}")
        return said, told

    def expect(self, what, good):
        self.steps += 1
        if not good:
            self.fail(what, "is not so")

    def fail(self, step, why):
        self.failures.append(step)
        print(f"{self.name}: {step}\n   {why}", flush=True)

    @contextlib.contextmanager
    def server(self, command, ready, environment=None):
        """Runs it meanwhile. ready: a pattern of its standard error; the match is given."""
        log = self.path(f"out/server-{len(self.servers)}.log")
        self.servers.append(log)
        with open(log, "wb") as file:
            process = subprocess.Popen(["bash", "-c", "exec " + command], cwd=self.folder, stderr=file,
                                       env={**self.environment, **(environment or {})})
        try:
            until, match = time.monotonic() + PATIENCE, None
            while match is None and time.monotonic() < until and process.poll() is None:
                match = re.search(ready, log.read_text(errors="replace"))
                time.sleep(0.05)
            if match is None:
                raise SystemExit(f"{self.name}: {command}: {log.read_text(errors='replace')[-3000:]}")
            yield match
        finally:
            process.terminate()
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                self.fail(command, "did not stop")

    def end(self):
        self.temporary.cleanup()
        if self.failures:
            print(f"{self.name}: {len(self.failures)} of {self.steps} steps are not as expected:", *self.failures, sep="\n  ")
        else:
            print(f"{self.name}: {self.steps} steps, all as expected")
        sys.exit(1 if self.failures else 0)


def blocks(page, language="bash"):
    """The blocks of code of a page, in their order, with the line that each begins at."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = []
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        found.append((text.count("\n", 0, match.start()) + 2, match[1]))
    return found
