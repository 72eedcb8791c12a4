"""How near ring orders are to the optimum, and how long the search takes; prints a table.

    python tests/bench/nccl_orders.py [--seeds N] [--first SEED] [--nodes 64 512 ...]

Up to 12 nodes what the search finds is compared with the exact optimum (the product uses the exact one there); above,
with lower bounds. Then the gain that is predicted on simulated machines, whose nodes were given in a random order,
beside the gain that it (where none is advised: the best order) brings by the fabric's own capacities. Seconds are of
one core's time.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tools.nccl import analyse
from tools.nccl.measurement import Floats
from tools.nccl.route.advice import advise
from tools.nccl.route.ring import order_ring, search_ring
from tools.nccl.simulate.fabric import Fabric, dragonfly, fat_tree, rails
from tools.nccl.simulate.prober import Simulator

KINDS = ("uniform", "groups", "two levels", "plane", "noise only", "one slow node", "asymmetric")
TIE = 1 + 1e-6
"""What breaks ties between equal edges."""


def matrix_of(kind: str, nodes: int, seed: int) -> Floats:
    """Return a matrix of costs: in groups and levels with noise of 5 %, points in a plane, or without structure."""
    random = np.random.default_rng([seed, nodes, KINDS.index(kind)])
    noise = np.exp(random.normal(0, 0.05, (nodes, nodes)))
    group = random.integers(0, max(2, nodes // 8), nodes)
    apart = group[:, None] != group
    if kind in ("uniform", "asymmetric"):
        cost = random.uniform(1, 10, (nodes, nodes))
    elif kind == "groups":
        cost = np.where(apart, 3.0, 1.0) * noise
    elif kind == "two levels":
        cost = (1.0 + apart + 2 * (group[:, None] // 4 != group // 4)) * noise
    elif kind == "plane":
        place = random.uniform(size=(nodes, 2))
        cost = np.hypot(*(place[:, None] - place).transpose(2, 0, 1)) + 0.01
    else:
        cost = noise
        if kind == "one slow node":
            cost[nodes // 2] *= 4
    return cost if kind == "asymmetric" else np.maximum(cost, cost.T)


def against_the_optimum(kind: str, seeds: range) -> str:
    """Compare on 5 to 12 nodes; the sum is compared where the slowest edge is the least."""
    worst, total = [], []
    for seed in seeds:
        cost = matrix_of(kind, 5 + seed % 8, seed)
        best, found = order_ring(cost, margin=0, slack=0), search_ring(cost)
        worst.append(found.worst / best.worst - 1)
        if found.worst <= best.worst * TIE:
            total.append(found.total / best.total - 1)
    share = len(total) / len(worst)
    return (
        f"{kind:14} slowest edge {np.mean(worst):7.3%} {np.max(worst):7.3%}   sum {np.mean(total):7.3%} "
        f"{np.max(total):7.3%}   least slowest edge found {share:6.1%}"
    )


def against_bounds(kind: str, nodes: int, seed: int) -> str:
    """Order many nodes once."""
    cost = matrix_of(kind, nodes, seed)
    start = time.process_time()
    found = order_ring(cost, margin=0, slack=0)
    spent = time.process_time() - start
    edge, total = found.worst / found.bound - 1, found.total / found.total_bound - 1
    return f"{nodes:5} {kind:14} {spent:6.2f} s   slowest edge {edge:7.3%}   sum {total:7.3%}"


def fabrics(seed: int) -> list[Fabric]:
    """Return machines, with and without something to gain, their nodes in a random order."""
    machines = [
        fat_tree(16, 4, 4, "switch", 8, 2.0),
        fat_tree(32, 4, 4, "switch", 8, 4.0),
        fat_tree(32, 8, 8, "switch", 8, 1.0),
        fat_tree(64, 4, 2, "islands", 16, 4.0),
        fat_tree(128, 4, 4, "switch", 16, 2.0),
        dragonfly(64, 4, 4, "mesh", 8, 2, 3.0),
        rails(32, 8, 8, "switch", 8),
    ]
    random = np.random.default_rng(seed)
    orders = [random.permutation(one.nodes) for one in machines]
    return [
        replace(one, leaf=one.leaf[order], cell=one.cell[order])
        for one, order in zip(machines, orders, strict=True)
    ]


def true_rate(fabric: Fabric, order: Sequence[int]) -> float:
    """Return the pace of a ring by the capacities of nodes, leaves and groups of leaves."""
    node = fabric.nics_per_node * fabric.nic
    rate = node
    for groups, share in ((fabric.leaf, fabric.uplink), (fabric.cell, fabric.global_link)):
        here = groups[np.asarray(order)]
        leaving = np.bincount(here[here != np.roll(here, -1)], minlength=int(groups.max()) + 1)
        capacity = np.bincount(groups) * node * share
        rate = min(rate, float((capacity[leaving > 0] / leaving[leaving > 0]).min(initial=np.inf)))
    return rate


def gain(fabric: Fabric, seed: int) -> str:
    """Measure a simulated machine, and compare the gain of the advised order with its true one."""
    seen = Simulator(fabric, seed=seed).measure(budget_s=600, seed=seed)
    findings = analyse.run(seen)
    start = time.process_time()
    advice = advise(seen, findings)
    spent = time.process_time() - start
    given = range(fabric.nodes)
    order = [seen.nodes.index(name) for name in advice.order]
    # Where no order is advised, what the best one would have brought.
    order = order or np.lexsort((fabric.leaf, fabric.cell)).tolist()
    true = true_rate(fabric, order) / true_rate(fabric, given) - 1
    told = "no gain" if not advice.order else f"{advice.gain_predicted:+.0%}"
    return f"{fabric.nodes:5} {fabric.kind:14} predicted {told:>8}   true {true:+6.0%}   {spent:.2f} s"


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200, help="matrices of each kind, of 5 to 12 nodes")
    parser.add_argument("--first", type=int, default=10_000, help="the first seed")
    parser.add_argument("--nodes", type=int, nargs="*", default=[64, 512, 1024, 4096])
    parser.add_argument("--machines", type=int, default=3, help="random orders of each simulated machine")
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.seeds)
    print(
        f"above the optimum, mean and worst of {args.seeds} matrices (seeds {seeds.start} to {seeds.stop - 1}):"
    )
    for kind in KINDS:
        print(against_the_optimum(kind, seeds), flush=True)
    print("above the lower bound:")
    for nodes in args.nodes:
        for kind in KINDS:
            print(against_bounds(kind, nodes, args.first), flush=True)
    print("gain of the advised order over a random one on simulated machines:")
    for seed in range(args.first, args.first + args.machines):
        for fabric in fabrics(seed):
            print(gain(fabric, seed), flush=True)


if __name__ == "__main__":
    main()
