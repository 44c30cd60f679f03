"""Where a figure comes from: the commit of the program, the machine, the day. Every line of results has them.

provenance.py cpu|cuda puts them into the JSON lines of its input."""
import datetime
import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
# What decides what comes out; a commit of anything else is none here.
PROGRAM = "CMakeLists.txt common decoder http_api include kernels kvstore library model prefill proto serving tools".split()


def output(*command):
    try:
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=ROOT, text=True,
                              check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def commit():
    """The last one that changed the program, and whether there are changes since; empty: no git here."""
    name = output("git", "log", "-1", "--abbrev=7", "--format=%h", "--", *PROGRAM)
    return name and name + ("+" if output("git", "status", "--porcelain", "--", *PROGRAM) else "")


def machine(device):
    if device == "cuda":
        return output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()[0]
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        info = dict(line.split(":", 1) for line in file if ":" in line)
    info = {name.strip(): value.strip() for name, value in info.items()}
    flags = info.get("flags", "").split()
    widest = next((name for name in ("amx_tile", "avx512f", "avx2") if name in flags), "no avx2")
    return f"{info.get('model name', 'unknown')}, {widest}"


def of(device, given=None):
    """given: the commit, where git does not tell."""
    return {"commit": given or commit() or "unknown", "machine": machine(device),
            "date": datetime.date.today().isoformat()}


if __name__ == "__main__":
    here = of(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps({**json.loads(line), **here}), flush=True)
