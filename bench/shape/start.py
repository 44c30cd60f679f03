#!/usr/bin/env python3
"""How long `carrel ask` takes from its start until its prompt begins to pass the model, and how much of a CPU. One JSON
object. Usage: start.py CARREL MODEL"""
import json
import os
import subprocess
import sys
import time


def main():
    program, model = sys.argv[1:]
    start = time.monotonic()
    run = subprocess.run([program, "ask", "--model", model, "a short question", "--max-tokens", "1", "--json"],
                         stdout=subprocess.PIPE, check=True)
    seconds = time.monotonic() - start
    reply = json.loads(run.stdout)
    usage = os.times()
    print(json.dumps({"start_s": round(seconds - reply["prompt_seconds"] - reply["generate_seconds"], 3),
                      "whole_s": round(seconds, 3), "cpu_s": round(usage.children_user + usage.children_system, 3)}))


if __name__ == "__main__":
    main()
