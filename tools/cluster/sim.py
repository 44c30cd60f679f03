#!/usr/bin/env python3
"""Where contexts lie in a cluster, simulated: which share of questions finds its context on the replica that it goes to, and how
evenly they spread, for several rules of placement. Sizes docs/cluster.md.

Questions arrive at random (Poisson), for contexts by Zipf's law; each replica holds `slots` whole contexts, the least recently asked
goes; at four fifths of the run one replica is lost. Hits are counted from a third on: the beginning fills caches.

  tools/cluster/sim.py                                 the table of docs/cluster.md, some minutes
  tools/cluster/sim.py --replicas 10 --slots 200       one size; --help for the rest
"""
import argparse
import bisect
import collections
import hashlib
import heapq
import random
import sys

POLICIES = {
    "rendezvous": "the one replica that a context's hash ranks first",
    "best-of-two": "of the two that rank first, the one that does less",
    "second-if-busy": "the second only while the first does over 1.5 times the mean",
    "ring": "the next on a ring of hashes",
    "bounded": "that, or the next one that does not do over 1.5 times the mean: what Envoy does (deploy/cluster)",
}
POINTS = 1024  # of a replica on the ring


def number(text):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class Cache:
    """Whole contexts, the least recently asked goes."""

    def __init__(self, slots):
        self.slots, self.held = slots, collections.OrderedDict()

    def ask(self, context):
        if context in self.held:
            self.held.move_to_end(context)
            return True
        self.held[context] = True
        if len(self.held) > self.slots:
            self.held.popitem(last=False)
        return False


class Placement:
    """The replicas of a context in the order in which they are tried."""

    def __init__(self, replicas, on_ring):
        self.replicas, self.on_ring = list(replicas), on_ring
        self.change()

    def change(self):
        self.known = {}
        self.ring = sorted((number(f"{replica}/{i}"), replica) for replica in self.replicas for i in range(POINTS)) if self.on_ring else []

    def lose(self, replica):
        self.replicas.remove(replica)
        self.change()

    def order(self, context):
        if context not in self.known:
            if self.on_ring:
                at = bisect.bisect(self.ring, (number(context),))
                seen = {}
                while len(seen) < len(self.replicas):
                    seen[self.ring[at % len(self.ring)][1]] = True
                    at += 1
                self.known[context] = list(seen)
            else:
                self.known[context] = sorted(self.replicas, key=lambda replica: number(replica + context), reverse=True)[:2]
        return self.known[context]


def choose(policy, order, active, replicas):
    if policy in ("rendezvous", "ring"):
        return order[0]
    if policy == "best-of-two":
        return min(order, key=lambda replica: (active[replica], order.index(replica)))
    mean = sum(active[replica] for replica in replicas) / len(replicas)
    if policy == "second-if-busy":
        return order[0] if active[order[0]] <= 1.5 * mean + 1 else order[1]
    bound = max(1.5 * (mean + 1 / len(replicas)), 1)
    return next((replica for replica in order if active[replica] < bound), order[0])


def run(policy, args, replicas, slots, zipf):
    """(hits, hits after one was lost, load of the busiest / mean, 99th percentile of what runs on the chosen one)"""
    draw = random.Random(args.seed)
    placement = Placement([f"replica-{i}" for i in range(replicas)], policy in ("ring", "bounded"))
    weights = [1 / (i + 1) ** zipf for i in range(args.contexts)]
    names = [f"context-{draw.random()}" for _ in weights]
    caches = {replica: Cache(slots) for replica in placement.replicas}
    active, load, ends, peaks, now = collections.Counter(), collections.Counter(), [], [], 0.0
    lost_at = args.questions * 4 // 5
    counts = {"before": [0, 0], "after": [0, 0]}
    for i, context in enumerate(draw.choices(names, weights, k=args.questions)):
        now += draw.expovariate(args.active * replicas)
        while ends and ends[0][0] <= now:
            active[heapq.heappop(ends)[1]] -= 1
        if i == lost_at:
            placement.lose("replica-0")
        replica = choose(policy, placement.order(context), active, placement.replicas)
        active[replica] += 1
        heapq.heappush(ends, (now + draw.expovariate(1), replica))
        hit = caches[replica].ask(context)
        if i < args.questions // 3:
            continue
        part = counts["after" if i >= lost_at else "before"]
        part[0], part[1] = part[0] + hit, part[1] + 1
        load[replica] += i < lost_at
        peaks.append(active[replica])
    peaks.sort()
    mean = sum(load.values()) / replicas
    return (*(part[0] / max(1, part[1]) for part in counts.values()), max(load.values()) / mean, peaks[len(peaks) * 99 // 100])


def moved(replicas, contexts, on_ring):
    """Share of contexts whose first replica is another one when one of all is lost."""
    names = [f"context-{i}" for i in range(contexts)]
    all_of_them = Placement([f"replica-{i}" for i in range(replicas)], on_ring)
    before = {name: all_of_them.order(name)[0] for name in names}
    all_of_them.lose("replica-0")
    return sum(before[name] != all_of_them.order(name)[0] for name in names) / contexts


def main():
    parser = argparse.ArgumentParser(prog="tools/cluster/sim.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="\n".join(f"{name:14} {what}" for name, what in POLICIES.items()))
    parser.add_argument("--replicas", type=int, help="of one size; by default 10, 30 and 100")
    parser.add_argument("--slots", type=int, help="contexts that a replica holds; with --replicas")
    parser.add_argument("--zipf", type=float, nargs="+", default=[0.8, 1.1], help="how uneven questions are (default 0.8 1.1)")
    parser.add_argument("--contexts", type=int, default=1000)
    parser.add_argument("--questions", type=int, default=16000)
    parser.add_argument("--active", type=float, default=16, help="questions at a time per replica, in the mean (default 16)")
    parser.add_argument("--policy", choices=POLICIES, nargs="+", default=list(POLICIES))
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if (args.replicas is None) != (args.slots is None):
        parser.error("--replicas and --slots go together")
    if min(args.replicas or 2, args.slots or 1, args.contexts, args.questions // 5) < 1 or args.active <= 0 or (args.replicas or 2) < 2:
        parser.error("two replicas at least, and one of everything else")
    print("| replicas x slots | zipf | rule | hits | after a loss | busiest / mean | p99 at a time |\n|---|---|---|---|---|---|---|")
    sizes = [(args.replicas, args.slots)] if args.replicas else [(10, 40), (30, 20), (100, 10)]
    for replicas, slots in sizes:
        for zipf in args.zipf:
            for policy in args.policy:
                hits, after, busiest, p99 = run(policy, args, replicas, slots, zipf)
                print(f"| {replicas} x {slots} | {zipf} | {policy} | {hits:.3f} | {after:.3f} | {busiest:.2f} | {p99} |", flush=True)
    for replicas, _ in sizes:
        print(f"{replicas} replicas, one lost: of {args.contexts} contexts {moved(replicas, args.contexts, False):.1%} have another first one by "
              f"rendezvous, {moved(replicas, args.contexts, True):.1%} on the ring", file=sys.stderr)


if __name__ == "__main__":
    main()
