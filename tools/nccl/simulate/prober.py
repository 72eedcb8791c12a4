"""A simulated machine that answers like the ranks of a job."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.nccl import campaign
from tools.nccl.findings import Part, Symptom
from tools.nccl.measurement import Exchange, Floats, Measurement
from tools.nccl.simulate.fabric import LATENCY_S, Fabric, Indices, fair_shares
from tools.nccl.simulate.faults import Planted

REPETITIONS = 10
ROUND_S = 0.3
"""What a round takes beside the transfers themselves: agreement, connections, small messages."""
EXCHANGE_BYTES = 64 * 2**20
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Noise:
    """How much healthy figures differ."""

    test: float = 0.02
    """Sigma of the logarithm from one exchange to the next."""
    part: float = 0.008
    """The same from one NIC or GPU to the next, for good."""
    latency: float = 0.025
    outliers: float = 0.004
    """Share of exchanges that something else on the machine disturbs: 30 to 90 % of their speed left."""
    background: float = 0.06
    """Most that other jobs take of a shared uplink during a round."""


class Simulator:
    """A prober over a fabric with planted faults; `clock` is the time that it would have taken."""

    def __init__(
        self, fabric: Fabric, planted: Sequence[Planted] = (), *, noise: Noise | None = None, seed: int = 0
    ) -> None:
        self.fabric = fabric
        self.noise = noise or Noise()
        self._rng = np.random.default_rng(seed)
        self._now_s = 0.0
        self._round = 0
        self._planted = planted
        ranks = fabric.nodes * fabric.gpus_per_node
        vary = self._rng.normal
        self._nic = fabric.nic * np.exp(vary(0, self.noise.part, (fabric.nodes, fabric.nics_per_node)))
        self._gpu = np.exp(vary(0, self.noise.part, ranks))
        self._gpu_out = np.ones(ranks)
        self._dead = np.zeros(ranks, dtype=bool)
        sets = int(fabric.leaf.max()) + 1
        per_leaf = np.bincount(fabric.leaf, minlength=sets)
        switches = fabric.nics_per_node if fabric.by_rail else 1
        share = fabric.nics_per_node / switches * fabric.nic * fabric.uplink
        self._uplink = np.repeat((per_leaf * share)[:, None], switches, axis=1)
        self._global = np.bincount(fabric.cell) * fabric.nics_per_node * fabric.nic * fabric.global_link
        for one in planted:
            self._plant(one)

    def clock(self) -> float:
        """Seconds that the exchanges so far would have taken."""
        return self._now_s

    def exchange(self, pairs: Sequence[tuple[int, int]]) -> list[Exchange]:
        """Make one round."""
        table = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
        first, second = table[:, 0], table[:, 1]
        columns = self._exchange(first, second)
        number = self._round
        self._round += 1
        return [
            Exchange(a, b, latency, bandwidth, slowest, number, wrong)
            for a, b, latency, bandwidth, slowest, wrong in zip(
                first.tolist(), second.tolist(), *(column.tolist() for column in columns), strict=True
            )
        ]

    def measure(self, *, budget_s: float = float("inf"), seed: int = 0) -> Measurement:
        """Run a campaign and return what it saw."""
        fabric = self.fabric
        exchanges, unmeasured = campaign.run(
            fabric.nodes,
            fabric.gpus_per_node,
            self,
            budget_s=budget_s,
            seed=seed,
            names=fabric.names,
            clock=self.clock,
        )
        about = {"fabric": fabric.kind, "seconds": self._now_s, "exchange_bytes": EXCHANGE_BYTES}
        return Measurement(
            fabric.names, fabric.gpus_per_node, "simulated", exchanges, unmeasured=unmeasured, about=about
        )

    def _exchange(self, first: Indices, second: Indices) -> tuple[Floats, Floats, Floats, Indices]:
        gpus = self.fabric.gpus_per_node
        inside = first // gpus == second // gpus
        rate = np.zeros(len(first))
        dead = self._dead[first] | self._dead[second]
        across = ~inside & ~dead
        rate[inside] = self._inside(first[inside], second[inside])
        rate[across] = self._between(first[across], second[across])
        latency = self._latency(first, second)
        rng, noise, count = self._rng, self.noise, len(first)
        disturbed = rng.random(count) < noise.outliers
        factor = np.exp(rng.normal(0, noise.test, count))
        factor[disturbed] *= rng.uniform(0.3, 0.9, int(disturbed.sum()))
        bandwidth = rate * factor
        worst = np.exp(-np.abs(rng.normal(0.06, 0.03, count)))
        rare = rng.random(count) < noise.outliers
        worst[rare] *= rng.uniform(0.2, 0.9, int(rare.sum()))
        slowest = bandwidth * worst
        self._flicker(first, second, bandwidth, slowest)
        bandwidth[dead] = slowest[dead] = 0.0
        latency[dead] = np.nan
        wrong = self._wrong(first, second)
        wrong[dead] = 0
        alive = bandwidth[bandwidth > 0]
        transfer_s = REPETITIONS * EXCHANGE_BYTES / alive.min() if len(alive) else 0.0
        self._now_s += ROUND_S + transfer_s + (TIMEOUT_S if dead.any() else 0.0)
        return latency, bandwidth, slowest, wrong

    def _inside(self, first: Indices, second: Indices) -> Floats:
        gpus = self.fabric.gpus_per_node
        rate = self.fabric.inside[first % gpus, second % gpus] * np.minimum(
            self._gpu[first], self._gpu[second]
        )
        for one in self._planted:
            if one.part is Part.nvlink:
                ends = [one.nodes[0] * gpus + gpu for gpu in one.gpus]
                hit = np.isin(first, ends) & np.isin(second, ends)
                rate[hit] *= one.left
        return rate

    def _between(self, first: Indices, second: Indices) -> Floats:
        fabric, gpus = self.fabric, self.fabric.gpus_per_node
        a, b = first // gpus, second // gpus
        nics = fabric.nics_per_node
        nic_a, nic_b = fabric.nic_of(first % gpus), fabric.nic_of(second % gpus)
        switches = self._uplink.shape[1]
        up_a = fabric.leaf[a] * switches + (nic_a if fabric.by_rail else 0)
        up_b = fabric.leaf[b] * switches + (nic_b if fabric.by_rail else 0)
        crossing = fabric.leaf[a] != fabric.leaf[b]
        far = fabric.cell[a] != fabric.cell[b]
        at_uplink = self._nic.size
        at_global = at_uplink + self._uplink.size
        uses = np.stack(
            [
                a * nics + nic_a,
                b * nics + nic_b,
                np.where(crossing, at_uplink + up_a, -1),
                np.where(crossing, at_uplink + up_b, -1),
                np.where(far, at_global + fabric.cell[a], -1),
                np.where(far, at_global + fabric.cell[b], -1),
            ],
            axis=1,
        )
        others = 1 - self._rng.uniform(0, self.noise.background, self._uplink.size + self._global.size)
        capacity = np.concatenate([self._uplink.ravel(), self._global]) * others
        limit = fabric.nic * np.minimum(self._gpu_out[first], self._gpu_out[second])
        rate = fair_shares(uses, np.concatenate([self._nic.ravel(), capacity]), limit * 1.05)
        for one in self._planted:
            if one.part is Part.link and one.symptom is Symptom.slow:
                rate[self._on_link(one, first, second)] *= one.left
        return rate

    def _latency(self, first: Indices, second: Indices) -> Floats:
        fabric, gpus = self.fabric, self.fabric.gpus_per_node
        a, b = first // gpus, second // gpus
        usual = np.select(
            [a == b, fabric.leaf[a] == fabric.leaf[b], fabric.cell[a] == fabric.cell[b]],
            [LATENCY_S["inside"], LATENCY_S["leaf"], LATENCY_S["cell"]],
            LATENCY_S["far"],
        )
        for one in self._planted:
            if one.symptom is Symptom.late:
                usual = np.where(
                    (a != b) & (np.isin(a, one.nodes) | np.isin(b, one.nodes)), usual / one.left, usual
                )
        disturbed = self._rng.random(len(first)) < self.noise.outliers
        odd = np.where(disturbed, self._rng.uniform(1.2, 5, len(first)), 1.0)
        spread: Floats = usual * np.exp(self._rng.normal(0, self.noise.latency, len(first))) * odd
        return spread

    def _flicker(self, first: Indices, second: Indices, bandwidth: Floats, slowest: Floats) -> None:
        for one in self._planted:
            if one.symptom is Symptom.flaky:
                hit = np.flatnonzero(self._on_link(one, first, second))
                slow = self._rng.binomial(REPETITIONS, one.often, len(hit))
                slowest[hit[slow > 0]] = bandwidth[hit[slow > 0]] * one.left
                bandwidth[hit[slow > REPETITIONS / 2]] *= one.left

    def _wrong(self, first: Indices, second: Indices) -> Indices:
        wrong = np.zeros(len(first), dtype=np.int64)
        for one in self._planted:
            if one.symptom is Symptom.wrong:
                rank = one.nodes[0] * self.fabric.gpus_per_node + one.gpus[0]
                hit = ((first == rank) | (second == rank)) & (self._rng.random(len(first)) < one.often)
                wrong[hit] = self._rng.integers(1, 1000, int(hit.sum()))
        return wrong

    def _on_link(self, one: Planted, first: Indices, second: Indices) -> np.ndarray:
        gpus = self.fabric.gpus_per_node
        hit = np.isin(first // gpus, one.nodes) & np.isin(second // gpus, one.nodes)
        hit &= first // gpus != second // gpus
        if one.nic is not None:
            hit &= self.fabric.nic_of(first % gpus) == one.nic
        return hit

    def _plant(self, one: Planted) -> None:
        gpus = self.fabric.gpus_per_node
        nodes = list(one.nodes)
        ranks = [node * gpus + gpu for node in nodes for gpu in (one.gpus or range(gpus))]
        if one.symptom is Symptom.silent:
            self._dead[ranks] = True
        if one.symptom is not Symptom.slow:
            return
        if one.part is Part.rail:
            self._nic[:, one.nic] *= one.left
        elif one.part is Part.switch:
            self._uplink[self.fabric.leaf[nodes[0]]] *= one.left
        elif one.part is Part.node or one.part is Part.nic:
            self._nic[nodes, slice(None) if one.nic is None else one.nic] *= one.left
        elif one.part is Part.gpu:
            self._gpu[ranks] *= one.left
            # Its share of a NIC that it shares is what it can lose.
            self._gpu_out[ranks] = one.left * self.fabric.nics_per_node / max(gpus, self.fabric.nics_per_node)
