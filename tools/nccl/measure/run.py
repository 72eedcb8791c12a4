"""One rank of a measurement: find the others, then exchanges, collectives, and all-reduce in other ways and orders."""

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from contract.errors import ConfigError, PeerError
from tools.nccl import adapters, analyse, campaign
from tools.nccl.measure.collectives import Collectives, Series
from tools.nccl.measure.exchange import RankProber
from tools.nccl.measure.hung import Hung
from tools.nccl.measure.kept import Kept
from tools.nccl.measure.progress import Progress
from tools.nccl.measure.spec import Spec
from tools.nccl.measure.team import Team, check_places
from tools.nccl.measure.waits import Wait
from tools.nccl.measure.watch import Watch
from tools.nccl.measurement import Measurement
from tools.nccl.route.advice import advise
from train import roll_call
from train.bootstrap import Joined, join
from train.comm.hierarchical import HierarchicalAllReduce

FILE = "measurement.npz"
PROGRESS = "progress.json"
EXCHANGES_SHARE = 0.5
"""Of the budget, where collectives are measured too."""
MOST_ORDERED = 1024
"""Nodes of which an order is searched while all ranks wait."""
_THINK_S = 300.0
"""How long they do at most."""
_NEVER_S = 86400.0
"""The library's own limit: ours comes first, and knows who was waited for."""


def run(spec: Spec) -> None:
    """Measure as one rank of those that the environment tells of; rank 0 writes the result.

    Raises UserError. A rank that gets no answer in time ends its process with 76: see `watch`.
    """
    folder = Path(spec.folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Else NCCL's own watchdog ends the process at an error, and nobody has said who is missing.
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    joined = join(os.environ, spec.start_timeout_s)
    world, names = joined.world, list(spec.nodes)

    def place(rank: int) -> tuple[str, int]:
        node, gpu = divmod(rank, world.local_size)
        return names[node] if node < len(names) else f"node {node}", gpu

    watch = Watch(folder, world.rank, world.size, place, spec.roll_call_s)
    watch.step("start", "finding the other ranks", 2 * spec.start_timeout_s)
    own_connection = joined.store.clone() if world.size > 1 else None  # type: ignore[attr-defined]
    watch.start(own_connection)
    try:
        team = _gather_team(spec, joined, watch, names)
        _Session(spec, team, folder, _slurm_topology(joined.store, team.nodes)).run()
        watch.answer_no_more()
        team.meet("the end of the others", spec.start_timeout_s)
        watch.stop()
    except PeerError:
        _note_absent(folder, joined, place)
        raise
    except Exception as error:
        if not _is_lost_peer(error):
            raise
        watch.give_up(str(error).splitlines()[0])


def _gather_team(spec: Spec, joined: Joined, watch: Watch, names: list[str]) -> Team:
    """Find the other ranks; `names` get the names of the nodes."""
    world, store = joined.world, joined.store
    store.set(f"measure/{world.rank}", "here")
    if world.local_rank == 0:
        store.set(f"measure/node/{world.node_rank}", socket.gethostname())
        place = [os.environ.get(name, "") for name in ("SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN")]
        store.set(f"measure/topology/{world.node_rank}", json.dumps(place))
        if torch.cuda.is_available():
            _have_nccl_tell(Path(spec.folder), world.node_rank)
    device = roll_call.start_process_group(joined, spec.start_timeout_s, _NEVER_S)
    if device.type == "cpu":
        torch.set_num_threads(1)
    check_places(world, names)
    if not names:
        told = store.multi_get([f"measure/node/{number}" for number in range(world.nodes)])
        names += [name.decode() for name in told]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"two nodes are called {_repeated(names)}: give each node a name of its own in `nodes`"
        )
    team = Team(world.rank, world.size, names, world.local_size, device, watch, spec.round_timeout_s)
    team.make_groups()
    return team


def _have_nccl_tell(folder: Path, node: int) -> None:
    """Have NCCL write down, for one rank of each node, what it finds and does; what the user has set stays."""
    for name, value in (
        ("NCCL_TOPO_DUMP_FILE", folder / f"topo.{node}.xml"),
        ("NCCL_DEBUG_FILE", folder / f"nccl.{node}.log"),
        ("NCCL_DEBUG", "INFO"),
        ("NCCL_DEBUG_SUBSYS", "INIT,NET,GRAPH,ENV"),
    ):
        os.environ.setdefault(name, str(value))


def _slurm_topology(store: dist.Store, nodes: Sequence[str]) -> dict[str, list[str]]:
    """Where Slurm has each node, as it told there: (address, pattern); empty where it does not say."""
    told = store.multi_get([f"measure/topology/{number}" for number in range(len(nodes))])
    places = {name: json.loads(text) for name, text in zip(nodes, told, strict=True)}
    return places if all(address and pattern for address, pattern in places.values()) else {}


@dataclass(frozen=True)
class _Session:
    """What one rank does once all are there."""

    spec: Spec
    team: Team
    folder: Path
    switches: dict[str, list[str]]
    """Where Slurm has each node."""

    def run(self) -> None:
        spec, team = self.spec, self.team
        began_s = time.monotonic()
        dtype = getattr(torch, spec.dtype)
        kept = Kept(self._empty(), self.folder, resume=spec.resume and team.leads)
        progress = Progress(self.folder / PROGRESS if team.leads else None)
        hung = self._hung()
        progress.say("start", f"{team.ranks} ranks on {len(team.nodes)} nodes, {team.backend}")
        if spec.exchanges and team.ranks > 1:
            self._exchange(kept, progress, hung, dtype)
        kept.measurement.about["exchanges_s"] = round(time.monotonic() - began_s, 1)
        if spec.operations:
            left_s = max(1.0, spec.budget_s - (time.monotonic() - began_s))
            self._collect(kept, progress, hung, dtype, left_s)
        kept.measurement.about["seconds"] = round(time.monotonic() - began_s, 1)
        if team.leads:
            team.watch.step("plan", f"writing {FILE}", spec.start_timeout_s)
            kept.finish(self.folder / FILE)
            Hung.forget(self.folder)
        progress.say("end", f"{FILE} is written")

    def _empty(self) -> Measurement:
        team = self.team
        about: dict[str, Any] = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "torch": str(torch.__version__),
            "device": torch.cuda.get_device_name(team.device) if team.device.type == "cuda" else "CPU",
            "dtype": self.spec.dtype,
            "variables": {
                name: value
                for name, value in sorted(os.environ.items())
                if name.startswith(("NCCL_", "GLOO_"))
            },
        }
        if team.backend == "nccl":
            about["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
            about |= adapters.here()
        if "SLURM_JOB_ID" in os.environ:
            about["job"] = os.environ["SLURM_JOB_ID"]
        if self.switches:
            about["slurm_topology"] = self.switches
        return Measurement(
            list(team.nodes), team.gpus_per_node, team.backend, silent=dict(self.spec.silent), about=about
        )

    def _hung(self) -> Hung:
        if not self.team.leads:
            return Hung()
        if self.spec.resume:
            return Hung.take_up(self.folder)
        Hung.forget(self.folder)
        return Hung()

    def _exchange(self, kept: Kept, progress: Progress, hung: Hung, dtype: torch.dtype) -> None:
        spec, team = self.spec, self.team
        share = EXCHANGES_SHARE if spec.operations else 1.0
        prober = RankProber(
            team,
            kept,
            progress,
            message_bytes=spec.message_bytes(team.backend),
            skip={(first, second) for first, second in spec.skip}
            | hung.ranks(team.nodes, team.gpus_per_node),
            renew_rounds=spec.rounds_between_renewals(team.backend),
            pair_s=spec.pair_s,
            dtype=dtype,
        )
        kept.measurement.about["exchange_bytes"] = prober.message_bytes
        if team.leads:
            exchanges, left_out = campaign.run(
                len(team.nodes),
                team.gpus_per_node,
                prober,
                budget_s=spec.budget_s * share,
                seed=spec.seed,
                names=team.nodes,
                say=lambda text: progress.say("exchanges", text),
            )
            prober.end()
            kept.close_exchanges(exchanges)
            kept.measurement.unmeasured += left_out
        else:
            prober.serve()

    def _collect(
        self, kept: Kept, progress: Progress, hung: Hung, dtype: torch.dtype, budget_s: float
    ) -> None:
        spec, team = self.spec, self.team
        collectives = Collectives(team, kept, progress, dtype, repetitions=spec.repetitions, hung=hung.series)
        series: list[Series] = []
        for operation in spec.operations:
            series += collectives.series(operation)
            if operation == "all_reduce":
                series += self._other_all_reduces(kept, collectives)
        sizes = spec.all_sizes(team.backend, team.memory_bytes())
        collectives.measure(series, sizes, budget_s)

    def _other_all_reduces(self, kept: Kept, collectives: Collectives) -> list[Series]:
        """By nodes, and around a ring of nodes in the order that suits what was measured."""
        team, found = self.team, []
        if team.groups:
            reduce = HierarchicalAllReduce(team.groups["inside"], team.groups["between"])
            found.append(collectives.all_reduce("hierarchical", collectives.ring(), reduce))
        order = self._order(kept.measurement)
        order = team.told(order, _THINK_S)
        if order != list(range(len(team.nodes))):
            kept.measurement.about["order"] = [team.nodes[node] for node in order]
            per_node = team.gpus_per_node
            ranks = [node * per_node + gpu for node in order for gpu in range(per_node)]
            team.watch.step("start", "making the group in the order of the ring", team.limit_s)
            group = dist.new_group(ranks, sort_ranks=False)
            assert isinstance(group, dist.ProcessGroup)
            found.append(collectives.all_reduce("ordered", collectives.ring(group)))
        return found

    def _order(self, measurement: Measurement) -> Sequence[int]:
        """The order for a ring of nodes (on rank 0), the given one where another should bring nothing."""
        nodes = self.team.nodes
        given = list(range(len(nodes)))
        if not self.team.leads or len(measurement.exchanges) == 0:
            return given
        if len(nodes) > MOST_ORDERED:
            measurement.unmeasured.append(
                f"all-reduce in another order of nodes: with more than {MOST_ORDERED} it takes minutes to find one"
            )
            return given
        order = advise(measurement, analyse.run(measurement)).order
        # Fewer nodes, where some had better be left out, cannot be compared with all.
        return [nodes.index(name) for name in order] if len(order) == len(nodes) else given


def _note_absent(folder: Path, joined: Joined, place: Callable[[int], tuple[str, int]]) -> None:
    """Write down who did not come at all."""
    world = joined.world
    absent = [rank for rank in range(world.size) if not joined.store.check([f"measure/{rank}"])]
    node, gpu = place(world.rank)
    nodes = list(dict.fromkeys(place(rank)[0] for rank in absent))
    what = "finding the other ranks"
    Wait(world.rank, node, gpu, "start", what, "they did not come", 0.0, [], absent, nodes).write(folder)


def _is_lost_peer(error: Exception) -> bool:
    """Whether the library has noticed that a rank is gone."""
    types = (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError)
    # gloo's errors have no type of their own; their text names its source files.
    return isinstance(error, types) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _repeated(names: Sequence[str]) -> str:
    return next(name for name in names if names.count(name) > 1)
