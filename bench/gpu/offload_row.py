"""One configuration of bench/gpu/offload: the numbers of a `carrel ask` or `eval --json` that count."""
import json
import sys


def main():
    result = json.loads(sys.stdin.read())
    stats = result["stats"]
    layers = stats["layers"]
    tokens = max(1, layers[-1]["tokens"])
    row = {
        "configuration": sys.argv[1],
        "ms_per_token": round(1e3 / result["tokens_per_s"], 3) if result["tokens_per_s"] else None,
        "gpu_mb_beside_weights": round((stats["device_bytes"] - stats["weight_bytes"]) / 1e6, 1),
        "rows_per_layer": layers[-1]["rows_attended"] // tokens,
        "kb_over_the_bus_per_token": round(sum(l["bytes_read"] for l in layers) / tokens / 1e3, 1),
    }
    for name in ("agreements", "exact_matches"):
        if name in result:
            row[name] = result[name]
    if sum(l["bytes"] for l in layers):
        row["kb_from_the_store_per_token"] = round(sum(l["bytes"] for l in layers) / tokens / 1e3, 1)
        row["wait_us_per_layer"] = round(sum(l["exposed_wait_us"] for l in layers) / tokens / len(layers), 1)
        ahead = [l["prefetch_hit_rate"] for l in layers if l.get("prefetch_hit_rate") is not None]
        if ahead:
            row["foreseen"] = round(sum(ahead) / len(ahead), 4)
            row["foreseen_by_layer"] = [round(a, 3) for a in ahead][:8]
    banks = [l["bank"] for l in layers if l.get("bank", {}).get("rows_wanted", 0) > 0]
    if banks:
        wanted = sum(b["rows_wanted"] for b in banks)
        row["slots"] = [min(b["slots"] for b in banks), max(b["slots"] for b in banks)]
        row["hit_rate"] = round(sum(b["hits"] for b in banks) / wanted, 4)
        row["hit_rates"] = [round(b["hit_rate"], 3) for b in banks][:8]
        foreseen = [b["share_foreseen"] for b in banks if "share_foreseen" in b]
        if foreseen:
            row["foreseen"] = round(sum(foreseen) / len(foreseen), 4)
            row["foreseen_by_layer"] = [round(f, 3) for f in foreseen][:8]
    print(json.dumps(row), flush=True)


main()
