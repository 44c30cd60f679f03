"""The JSON lines of bench.py as Markdown tables, one per length."""
import json
import sys

COLUMNS = ["", "prefill, tokens/s (per CPU s)", "first token: model loaded (and from the start), s",
           "ms per token (CPU ms)", "rows per KV head", "resident, MiB", "stored, MiB",
           "KL to dense", "top-1"]
NAMES = {"server": "Carrel, kvstore process (Unix socket)",
         "store": "Carrel, kvstore in the process", "host": "Carrel, --zone host",
         "dense": "Carrel, --top-k all", "decode": "llama.cpp"}


def number(entry, key, form, scale=1):
    value = entry.get(key)
    return "n/a" if value is None else format(value * scale, form)


def row(entry, prefilled):
    tokens = prefilled["tokens"]
    rows = entry.get("rows_per_kv_head", tokens)
    is_all = entry["setting"] in ("dense", "decode")
    return [NAMES[entry["setting"]],
            number(prefilled, "prefill_tokens_per_s", ".0f") + " (" +
            number(prefilled, "prefill_tokens_per_cpu_s", ".0f") + ")",
            number(entry, "restore_to_first_token_s", ".2f") + " (" +
            number(entry, "start_to_first_token_s", ".2f") + ")",
            number(entry, "ms_per_token", ".1f") + " (" +
            number(entry, "cpu_ms_per_token", ".0f") + ")",
            "all" if is_all else f"{rows:,.0f} ({100 * rows / tokens:.1f}%)",
            number(entry, "resident_bytes", ".0f", 2**-20),
            number(prefilled, "stored_bytes", ".0f", 2**-20),
            "-" if entry["setting"] == "dense" else number(entry, "kl", ".4f"),
            "-" if entry["setting"] == "dense" else number(entry, "top1", ".3f")]


def main():
    header, results = {}, {}
    with open(sys.argv[1], encoding="utf-8") as file:
        for line in file:
            entry = json.loads(line)
            if "length" in entry:
                results.setdefault(entry["length"], {})[entry["program"], entry["setting"]] = entry
            else:
                header = entry
    print(f"{header['cpu']}, {header['vectors']}, {header['cores']} cores, {header['threads']} "
          f"threads, load average {header['load_average_1min']:.1f} before it began (this program "
          "adds its own): times are upper bounds where others work.")
    for found in results.values():
        prefilled = {"carrel": found["carrel", "prefill"],
                     "llama.cpp": found.get(("llama.cpp", "prefill"))}
        print(f"\n{prefilled['carrel']['tokens']:,} tokens\n")
        print("| " + " | ".join(COLUMNS) + " |")
        print("|---" * len(COLUMNS) + "|")
        for (program, setting), entry in found.items():
            if setting != "prefill":
                print("| " + " | ".join(row(entry, prefilled[program])) + " |")


if __name__ == "__main__":
    main()
