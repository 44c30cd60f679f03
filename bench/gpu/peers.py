"""What PyTorch reaches on the shapes of gpu_bench: decode attention and top-k, as JSON lines.

Timed as gpu_bench does: calls on buffers in turn, captured in one CUDA graph, the median of its
replays.
"""
import argparse
import json
import statistics

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Q_HEADS, KV_HEADS, HEAD_DIM, TOP_K = 32, 8, 128, 2048


def time_us(calls, runs):
    """Median time of one of the calls, in us."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        times = []
        for run in range(3 + runs):
            start = torch.cuda.Event(enable_timing=True)
            stop = torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            stop.record(stream)
            stop.synchronize()
            if run >= 3:
                times.append(start.elapsed_time(stop) * 1000 / len(calls))
    return statistics.median(times)


def report(kernel, n, call_list, byte_count, runs):
    try:
        us = time_us(call_list, runs)
    except Exception as error:  # a backend that does not serve the shape says so here
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = lines[0][:200]
        print(json.dumps({"kernel": kernel, "n": n, "refused": reason}), flush=True)
        return
    print(json.dumps({"kernel": kernel, "n": n, "us": round(us, 2), "bytes": byte_count,
                      "gb_per_s": round(byte_count / us * 1e-3, 1)}), flush=True)


def attention(n, runs):
    row_bytes = 2 * KV_HEADS * n * HEAD_DIM * 2
    layers = max(2, min(16, int(8e9 / row_bytes)))
    q = torch.randn(layers, 1, Q_HEADS, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    k = torch.randn(layers, 1, KV_HEADS, n, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    v = torch.randn(layers, 1, KV_HEADS, n, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    attend = functional.scaled_dot_product_attention
    for name, backend in (("sdpa_flash", SDPBackend.FLASH_ATTENTION),
                          ("sdpa_cudnn", SDPBackend.CUDNN_ATTENTION)):
        with sdpa_kernel(backend):
            calls = [lambda i=i: attend(q[i], k[i], v[i], enable_gqa=True) for i in range(layers)]
            report(name, n, calls, row_bytes, runs)


def top_k(n, runs):
    byte_count = KV_HEADS * n * 4
    copies = max(2, min(64, int(4e8 / byte_count) + 1))
    scores = torch.randn(copies, KV_HEADS, n, device="cuda")
    calls = [lambda i=i: torch.topk(scores[i], TOP_K) for i in range(copies)]
    report("torch_topk", n, calls, byte_count, runs)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("benches", nargs="*", metavar="decode | select | refine",
                        help="peers of these benches of gpu_bench alone")
    arguments = parser.parse_args()
    quick = arguments.quick
    wanted = set(arguments.benches) or {"decode", "select", "refine"}
    runs = 10 if quick else 40
    device = torch.cuda.get_device_name()
    print(json.dumps({"torch": torch.__version__, "device": device}), flush=True)
    for n in [32 << 10] if quick else [32 << 10, 128 << 10, 256 << 10, 1 << 20]:
        if wanted & {"decode", "refine"}:
            attention(n, runs)
            torch.cuda.empty_cache()
        if "select" in wanted:
            top_k(n, runs)


if __name__ == "__main__":
    main()
