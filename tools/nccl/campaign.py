"""Which pairs are measured, in which rounds, and what is measured again."""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from tools.nccl.analyse.doubt import Doubts, find_doubts
from tools.nccl.measurement import Exchange, Exchanges
from tools.nccl.plan import Plan, complete, inside_pairs, into_rounds, rail_pairs, rounds_of, sampled

Pair = tuple[int, int]

RESERVE = 1.3
"""Time for testing again, as a factor on the plan's own."""
TRIAL_ROUNDS = 3
"""Rounds between nodes after which the time of a round is known."""
HALVINGS = 5
"""Most times that doubts are tested again."""
GOOD_PARTNERS = 2
SUSPECT_ROUNDS = 6
"""Rounds of suspect nodes among each other: those of one switch are well with each other."""
GIVE_UP = 3
"""Partners without an answer after which a node counts as silent and is left alone."""


class Prober(Protocol):
    """Whoever can make exchanges: the ranks of a job, or the simulator."""

    def exchange(self, pairs: Sequence[Pair]) -> list[Exchange]:
        """Make one round of exchanges at the same time, no rank in two of them; one result a pair, in their order."""


def run(
    nodes: int,
    gpus_per_node: int,
    prober: Prober,
    *,
    budget_s: float,
    seed: int = 0,
    names: Sequence[str] | None = None,
    say: Callable[[str], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Exchanges, list[str]]:
    """Measure within about `budget_s`: inside nodes, between them, then what is in doubt once more.

    All pairs of nodes when there is time for it, else a sampled plan. Returns the exchanges, and sentences that say
    what was left out. names: what the nodes are called there; say:
    told in a sentence what comes next; clock: seconds, the prober's own in a simulation.
    """
    work = _Campaign(nodes, gpus_per_node, prober, clock, clock() + budget_s, say or (lambda _: None), names)
    work.inside()
    work.between(seed)
    work.resolve(np.random.default_rng(seed))
    return Exchanges.of([]) if not work.kept else _joined(work.kept), work.left_out


class _Campaign:
    """A campaign at work: what it has, and what it had to leave out."""

    def __init__(
        self,
        nodes: int,
        gpus: int,
        prober: Prober,
        clock: Callable[[], float],
        end_s: float,
        say: Callable[[str], None],
        names: Sequence[str] | None = None,
    ) -> None:
        self.nodes, self.gpus = nodes, gpus
        self.kept: list[Exchanges] = []
        self.left_out: list[str] = []
        self.silent: set[int] = set()
        self._prober, self._clock, self._end_s, self._say = prober, clock, end_s, say
        self._names = names
        self._refused: dict[int, set[int]] = {}
        self._answered: set[int] = set()

    @property
    def time_left_s(self) -> float:
        return self._end_s - self._clock()

    def round(self, pairs: list[Pair], *, keep: bool = True) -> None:
        """Exchange, without nodes that are known to be silent."""
        awake = [
            pair
            for pair in pairs
            if pair[0] // self.gpus not in self.silent and pair[1] // self.gpus not in self.silent
        ]
        if not awake:
            return
        found = self._prober.exchange(awake)
        self._listen(found)
        if keep:
            self.kept.append(Exchanges.of(found))

    def inside(self) -> None:
        """Measure the GPUs of all nodes, in all nodes at once."""
        plan = Plan(self.nodes, self.gpus, ())
        if plan.inside:
            self._say(f"GPUs inside {self.nodes} nodes: {plan.inside} rounds")
            self.round(plan.inside_pairs(0), keep=False)
        for number in range(plan.inside):
            if self.time_left_s <= 0:
                self.left_out.append(f"{plan.inside - number} rounds inside nodes: the time was up")
                return
            self.round(plan.inside_pairs(number))

    def between(self, seed: int) -> None:
        """Measure pairs of nodes: all when the first rounds show that there is time, else a sample."""
        plan = complete(self.nodes, self.gpus, seed)
        if not plan.between:
            return
        self.round(rail_pairs(plan.between_pairs(plan.between[0]), self.gpus), keep=False)
        self._say(f"{self.nodes} nodes: {len(plan.between)} rounds to measure all pairs")
        begun = self._clock()
        done = 0
        for done, number in enumerate(plan.between, 1):
            self.round(rail_pairs(plan.between_pairs(number), self.gpus))
            if done == min(TRIAL_ROUNDS, len(plan.between)):
                plan = self._fitting(plan, (self._clock() - begun) / done, done, seed)
            if done >= len(plan.between) or self.time_left_s <= 0:
                break
        sentence = plan.shortened(done).left_out()
        if sentence:
            self.left_out.append(sentence)

    def resolve(self, rng: np.random.Generator) -> None:
        """Test again what is odd until it is steady, each time fewer."""
        for halving in range(HALVINGS):
            doubts = find_doubts(_joined(self.kept), self.nodes, self.gpus) if self.kept else None
            if doubts is None or not (doubts.links or doubts.nodes or doubts.inside):
                return
            self._say(
                f"testing again: {len(doubts.links)} links, {len(doubts.nodes)} nodes, inside {len(doubts.inside)}"
            )
            if not self._again(doubts, rng, halving):
                self.left_out.append("the time was up before all that looked odd was tested again")
                return
            if not (doubts.links or doubts.inside):
                return

    def _again(self, doubts: Doubts, rng: np.random.Generator, halving: int) -> bool:
        """Test each doubt anew; return whether there was time for all.

        Each time half as many pairs share the fabric: what was slow by their traffic only becomes quick.
        """
        times = 1 if halving == 0 else 2
        most = max(1, self.nodes >> (halving + 2))
        rounds = [rail_pairs(one, self.gpus) for one in into_rounds(doubts.links, most)] * times
        rounds += [rail_pairs(one, self.gpus) for one in into_rounds(self._judged(doubts, rng), self.nodes)]
        rounds += [
            inside_pairs(doubts.inside, self.gpus, number)
            for number in range(rounds_of(self.gpus) if doubts.inside else 0)
        ] * times
        for pairs in rounds:
            if self.time_left_s <= 0:
                return False
            self.round(pairs)
        return True

    def _judged(self, doubts: Doubts, rng: np.random.Generator) -> list[Pair]:
        """Pair suspect nodes, and the ends of suspect links, with good ones, and suspects with each other."""
        pairs: list[Pair] = []
        few = doubts.nodes
        if len(few) > 1:
            for number in range(min(SUSPECT_ROUNDS, rounds_of(len(few)))):
                picked = Plan(len(few), 1, ()).between_pairs(number)
                pairs += [_sorted(few[a], few[b]) for a, b in picked.tolist()]
        ends = [node for link in doubts.links[: self.nodes] for node in link]
        for node in dict.fromkeys([*few, *ends]):
            some = rng.permutation(len(doubts.good))[:GOOD_PARTNERS].tolist()
            pairs += [_sorted(node, doubts.good[place]) for place in some]
        return list(dict.fromkeys(pairs))

    def _fitting(self, plan: Plan, round_s: float, done: int, seed: int) -> Plan:
        """Return the plan that the time allows, now that the time of a round is known."""
        rest = len(plan.between) - done
        affordable = done + int(min(rest, self.time_left_s / max(round_s * RESERVE, 1e-9)))
        if affordable >= len(plan.between):
            return plan
        few = sampled(self.nodes, self.gpus, seed=seed)
        chosen = few if len(few.between) <= affordable else plan.shortened(max(done, affordable))
        self._say(f"a round takes {round_s:.2g} s: {len(chosen.between)} rounds of {len(plan.between)}")
        return chosen

    def _listen(self, found: list[Exchange]) -> None:
        """Note who answers, and give up on nodes that never do."""
        for one in found:
            a, b = one.first // self.gpus, one.second // self.gpus
            if one.bandwidth > 0:
                self._answered.update((a, b))
            elif one.bandwidth == 0 and a != b:
                self._refused.setdefault(a, set()).add(b)
                self._refused.setdefault(b, set()).add(a)
        for node, others in self._refused.items():
            if node in self.silent or node in self._answered or len(others) < GIVE_UP:
                continue
            self.silent.add(node)
            name = f"number {node}" if self._names is None else self._names[node]
            self.left_out.append(
                f"node {name} did not answer {len(others)} others and was left out of the rest"
            )


def _joined(parts: list[Exchanges]) -> Exchanges:
    names = list(Exchanges.__dataclass_fields__)
    return Exchanges(**{name: np.concatenate([getattr(one, name) for one in parts]) for name in names})


def _sorted(a: int, b: int) -> Pair:
    return (a, b) if a < b else (b, a)
