"""Results of gpu_bench and peers.py, JSON lines in the files named, as Markdown tables."""
import json
import sys

LENGTHS = {32768: "32k", 131072: "128k", 262144: "256k", 1048576: "1M"}


DENSE = ["sdpa_flash", "sdpa_cudnn", "refine_dense"]
REFINE = ["hip", "hip_refresh_2", "hip_refresh_4", "hip_refresh_8", "infinitehip_from_stage_1",
          "infinitehip_from_stage_2", "infinitehip_from_stage_3", "infinitehip_kept",
          "infinitehip_default", "infinitehip_fast", "infinitehip_flash", "exact", "hash",
          "hash_rescored_2", "hash_rescored_4", "hash_signs", "hash_signs_rescored_4", "channels"]


def refine_table(results):
    """Methods of refine_bench: us per layer and token, and how much faster than dense."""
    lengths = sorted({n for kernel, n in results if kernel == "refine_dense"})
    if not lengths:
        return
    dense = {}
    for n in lengths:
        found = [results.get((kernel, n), {}) for kernel in DENSE]
        dense[n] = min(entry["us"] for entry in found if "us" in entry)
    print("\nAttention over 2,048 chosen rows, selection included: us (times faster than the "
          "best dense).\n")
    print("| method | " + " | ".join(LENGTHS.get(n, str(n)) for n in lengths) + " |")
    print("|---" * (len(lengths) + 1) + "|")
    for kernel in DENSE + REFINE:
        cells = []
        for n in lengths:
            us = results.get((kernel, n), {}).get("us")
            cells.append("" if us is None else f"{us:.1f} ({dense[n] / us:.1f})")
        print(f"| {kernel} | " + " | ".join(cells) + " |")


def main():
    header, peer_header, results = {}, {}, {}
    for name in sys.argv[1:]:
        with open(name, encoding="utf-8") as file:
            for line in file:
                entry = json.loads(line)
                if "kernel" in entry:
                    results[entry["kernel"], entry["n"]] = entry
                elif "torch" in entry:
                    peer_header = entry
                else:
                    header = entry

    def cell(kernel, n):
        entry = results.get((kernel, n))
        if entry is None:
            return ""
        if "refused" in entry:
            return "refused"
        share = entry["bytes"] / entry["us"] * 1e-3 / header["copy_gb_per_s"]
        return f"{entry['us']:.1f} ({100 * share:.0f}%)"

    print(f"{header['device']}; device copy {header['copy_gb_per_s'] / 1000:.2f} TB/s read + written, "
          f"device read {header['read_gb_per_s'] / 1000:.2f} TB/s, "
          f"bf16 GEMM {header['gemm_tflop_per_s']:.0f} TFLOP/s; "
          f"PyTorch {peer_header.get('torch', 'absent')}. "
          "us per launch (share of the copy rate).\n")
    lengths = sorted({n for kernel, n in results if kernel == "window_attention"})
    columns = ["sdpa_flash", "sdpa_cudnn", "window_attention", "hamming_topk",
               "sparse_attention", "select_and_attend", "topk", "torch_topk", "dot_score",
               "hash_encode"]
    print("| N | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for n in lengths:
        cells = [cell(kernel, n) for kernel in columns]
        print(f"| {LENGTHS.get(n, n)} | " + " | ".join(cells) + " |")
    refine_table(results)
    print("\n| kernel | shape | us (p10, p90) | GB/s |")
    print("|---|---|---|---|")
    for (kernel, n), entry in sorted(results.items()):
        if kernel not in columns + REFINE:
            print(f"| {kernel} | {entry.get('shape', n)} | {entry['us']:.1f} "
                  f"({entry['us_p10']:.1f}, {entry['us_p90']:.1f}) | {entry['gb_per_s']:.0f} |")


if __name__ == "__main__":
    main()
