#!/usr/bin/env python3
"""docs/using.md and README.md as typed, from top to bottom: using.py PROGRAM

Every block of code of a page in one shell, line after line. Only the port is another, and nobody waits for the eye: a
command behind `&` is given the time to listen.
"""
import re
import subprocess
import sys

import walk

RIGHT = "Fezi Draisfiolvio"  # whose badge number is 887243

# Until what the last command listens on is there.
READY = r"""
walk_ready() {
  for _ in $(seq 600); do
    case $1 in
      unix:*) [ -S "${1#unix:}" ] && return ;;
      *) curl -s -o /dev/null "http://$1/" && return ;;
    esac
    kill -0 $! 2>/dev/null || { echo "walk: $1: the server ended" >&2; exit 1; }
    sleep 0.1
  done
  echo "walk: $1 is not there" >&2; exit 1
}
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT
"""


def script(page, port):
    """The page's blocks, each line after a mark that says where it stands."""
    lines = [READY, "set -e -o pipefail"]
    for first, block in walk.blocks(page):
        if "./run" in block:  # builds, and runs all of this
            continue
        going_on = False
        for number, line in enumerate(block.split("\n"), first):
            line = line.replace("127.0.0.1:8080", f"127.0.0.1:{port}")
            if line.strip() and not line.startswith("#") and not going_on:
                lines.append(f"echo '=== {page}:{number}' >&2; echo '=== {page}:{number}'")
            lines.append(line)
            going_on = line.endswith("\\")
            if re.search(r"&\s*$", line):
                lines.append("walk_ready " + re.search(r"--listen (\S+)", line)[1])
    return "\n".join(lines) + "\n"


def run(at, page, expected):
    """expected: (of the page, a text that a command prints; what its output holds)."""
    at.steps += 1
    text = script(page, walk.free_port())
    at.write(f"out/{page.replace('/', '-')}.sh", text)
    try:
        done = subprocess.run(["bash", "-c", text], cwd=at.folder, env=at.environment, stdin=subprocess.DEVNULL,
                              capture_output=True, timeout=2 * walk.PATIENCE, check=False)
    except subprocess.TimeoutExpired as late:
        at.fail(page, f"still runs: {(late.stderr or b'').decode()[-2000:]}")
        return
    out, err = done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")
    if done.returncode != 0:
        at.fail(page, f"exit code {done.returncode} after {err[err.rfind('=== '):][:3000]}")
    parts = {}
    for part in out.split("=== ")[1:]:
        where, _, rest = part.partition("\n")
        parts[int(where.rsplit(":", 1)[1])] = rest
    source = (walk.ROOT / page).read_text(encoding="utf-8").split("\n")
    for command, holds in expected:
        at.steps += 1
        said = "".join(rest for number, rest in parts.items() if command in source[number - 1])
        if holds not in said:
            at.fail(f"{page}: {command}", f"its output lacks {holds!r}: {said[:1500]}")


def main():
    at = walk.Walk("using", sys.argv[1])
    run(at, "README.md", [("carrel ask", RIGHT)])
    run(at, "docs/using.md", [
        ("$carrel prefill", "registry-2k: "),
        ("$carrel ask --model", RIGHT),
        ("$carrel eval", '"exact_match"'),
        ("$carrel inspect", "registry-2k"),
        ("$carrel audit", "heads"),
        ("/v1/contexts?name=", '"name":"registry"'),
        ("/events", '"state":"ready"'),
        ("/v1/completions", "670492"),
        ("$carrel ask --api", "670492"),
    ])
    at.end()


if __name__ == "__main__":
    main()
