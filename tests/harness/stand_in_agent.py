"""An agent without torch, for tests of the supervisor: `python stand_in_agent.py NODE FOLDER`.

Its ranks count steps and save them as empty folders. FOLDER/plan.json says how long, and what goes wrong where:

    steps, step_s, limit_s (a rank may be silent), lease_s (so may the supervisor), linger_s (from a stop request to
        the end), stop_code (the code then)
    faults: each with start, rank, at (a step) and do: a code to leave with, "kill", "stop" or "agent" (kill that)
    nodes: for a node's name problems, unreachable, broken (how many of its starts fail), mute (it never answers),
           slow (which of its starts takes 3 s), time_s (how wrong its clock is), cpus
    network: for each try of a network test the verdict that rank 0 writes; or `code` with which ranks leave, and
             `silent`, the nodes that do not answer; `says`, what each rank writes into its log before

What the ranks were told is appended to FOLDER/told.jsonl.
"""

import contextlib
import ctypes
import json
import mmap
import os
import selectors
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from contract.agent import Decoder, Reply, Request, Task, encode
from contract.exit_codes import ExitCode
from contract.run_folder import Event, RunFolder, append_json_line

PR_SET_PDEATHSIG = 1
PULSE = struct.Struct("qd")


class StandIn:
    def __init__(self, node: str, folder: Path) -> None:
        self.node, self.folder = node, folder
        self.plan: dict[str, Any] = json.loads((folder / "plan.json").read_text())
        self.own: dict[str, Any] = self.plan.get("nodes", {}).get(node, {})
        self.ranks: dict[int, int] = {}
        self.pulses: dict[int, mmap.mmap] = {}
        self.attempt = ""
        self.will: tuple[list[str], float] | None = None
        self.heard = time.monotonic()
        self.leaving = False

    def run(self) -> None:
        starts = self.folder / f"starts-{self.node}"
        with starts.open("a") as file:
            file.write("x")
        if starts.stat().st_size <= self.own.get("broken", 0):
            sys.exit(3)
        if starts.stat().st_size == self.own.get("slow", 0):
            time.sleep(3.0)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, lambda number, frame: None)
        selector, decoder = selectors.DefaultSelector(), Decoder()
        selector.register(0, selectors.EVENT_READ)
        selector.register(reader, selectors.EVENT_READ)
        cpus = self.own.get("cpus", [0, 1])
        self.say(Reply.READY, host=self.node, pid=os.getpid(), time_s=time.time(), cpus=cpus)
        while not self.leaving:
            for key, _ in selector.select(0.2):
                data = os.read(key.fd, 65536)
                if key.fd == reader:
                    self.on_signals(set(data))
                elif not data:
                    return self.orphan()
                else:
                    self.heard = time.monotonic()
                    for message in decoder.feed(data):
                        if not self.own.get("mute"):
                            self.handle(message)
            if time.monotonic() - self.heard > self.plan.get("lease_s", 60):
                return self.orphan()
        return self.kill()

    def say(self, kind: Reply, **fields: Any) -> None:
        os.write(1, encode(kind, **fields))

    def handle(self, message: dict[str, Any]) -> None:
        kind = Request(message["kind"])
        if kind is Request.LISTEN:
            self.say(Reply.LISTENING, port=message["ports"][0])
        elif kind is Request.START:
            self.start(message)
        elif kind is Request.SIGNAL:
            self.signal(message["number"])
        elif kind is Request.STACKS:
            self.say(Reply.STACKS, ranks=self.describe())
        elif kind is Request.KILL:
            self.kill()
        elif kind is Request.CHECK:
            now = time.time() + self.own.get("time_s", 0)
            seen = Path(message["marker"]["path"]).read_text() == message["marker"]["text"]
            problems = self.own.get("problems", []) + ([] if seen else ["no marker"])
            self.say(Reply.HEALTH, problems=problems, time_s=now)
        elif kind is Request.PING:
            self.say(Reply.ALIVE, time_s=time.time(), ranks=self.describe())
        elif kind is Request.WILL:
            self.will = (message["command"], message["delay_s"])
        elif kind is Request.QUIT:
            self.leaving = True

    def start(self, message: dict[str, Any]) -> None:
        self.attempt = message["attempt"]
        append_json_line(self.folder / "told.jsonl", {"node": self.node, **message})
        for rank in range(message["first_rank"], message["first_rank"] + message["local_size"]):
            pulse = self.pulses[rank] = mmap.mmap(-1, PULSE.size)
            PULSE.pack_into(pulse, 0, 0, time.monotonic())
            pid = os.fork()
            if pid == 0:
                code = 1
                Path(message["log"].replace("{rank}", str(rank))).touch()
                with contextlib.suppress(BaseException):
                    code = self.train(message, rank, pulse)
                os._exit(code)
            self.ranks[pid] = rank

    def train(self, message: dict[str, Any], rank: int, pulse: mmap.mmap) -> int:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        stop: list[int] = []
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGUSR2, lambda number, frame: stop.append(number))
        signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
        if message["task"] == Task.ALL_REDUCE:
            return ExitCode.PEER_FAILED if self.own.get("unreachable") else 0
        if message["task"] == Task.PROGRAM:
            return self.measure(message, rank)
        run = RunFolder(self.folder)
        number = int(message["environment"]["TRIERARCH_START"])
        step = max(run.published_steps(), default=0)
        while step < self.plan["steps"]:
            time.sleep(self.plan.get("step_s", 0.02))
            step += 1
            PULSE.pack_into(pulse, 0, step, time.monotonic())
            for fault in self.plan.get("faults", []):
                if (fault["start"], fault["rank"], fault["at"]) == (number, rank, step):
                    self.suffer(fault["do"])
            if rank == 0:
                (run.checkpoints / f"step_{step}").mkdir(exist_ok=True)
            if stop:
                time.sleep(self.plan.get("linger_s", 0))
                append_json_line(self.folder / "stops.jsonl", {"rank": rank, "signals": len(stop)})
                return int(self.plan.get("stop_code", ExitCode.STOPPED))
        if rank == 0:
            run.append_event(Event.FINISHED, step=step)
            run.mark_finished()
        return 0

    def measure(self, message: dict[str, Any], rank: int) -> int:
        """Test the network: fail as the plan says for this try, else write the verdict that is planned."""
        tries: list[dict[str, Any]] = self.plan["network"]
        plan = tries[int(message["attempt"].removeprefix("network")) - 1]
        spec = json.loads(Path(message["arguments"][0]).read_text())
        if self.node in plan.get("silent", []):
            signal.pause()
        if "says" in plan:
            with Path(message["log"].replace("{rank}", str(rank))).open("a") as log:
                log.write(plan["says"])
        if "code" in plan:
            if "silent" in plan:
                note = {"what": "round 3", "reason": "no answer", "silent_nodes": plan["silent"]}
                (Path(spec["folder"]) / f"waited.{rank}.json").write_text(json.dumps(note))
                time.sleep(0.3)
            return int(plan["code"])
        if rank == 0:
            verdict = {"summary": "as planned", "exclude": {}, "order": [], **plan}
            (Path(spec["folder"]) / "verdict.json").write_text(json.dumps(verdict))
        return 0

    def suffer(self, what: int | str) -> None:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "agent":
            os.kill(os.getppid(), signal.SIGKILL)
        else:
            os._exit(int(what))

    def describe(self) -> list[dict[str, Any]]:
        found = []
        for pid, rank in self.ranks.items():
            step, beat = PULSE.unpack_from(self.pulses[rank])
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            silent = {"silent_s": time.monotonic() - beat, "limit_s": self.plan.get("limit_s", 60)}
            found.append({"rank": rank, "state": state, "phase": "step", "step": step, **silent})
        return found

    def on_signals(self, numbers: set[int]) -> None:
        for pid, rank in list(self.ranks.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self.ranks[pid]
                code = os.waitstatus_to_exitcode(status)
                self.say(Reply.EXITED, attempt=self.attempt, rank=rank, code=code)
        if numbers & {signal.SIGTERM, signal.SIGUSR2}:
            self.signal(signal.SIGTERM)
            self.say(Reply.STOPPING, signal="SIGTERM")

    def signal(self, number: int) -> None:
        for pid in self.ranks:
            os.kill(pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def orphan(self) -> None:
        self.kill()
        if self.will is not None:
            time.sleep(self.will[1])
            subprocess.run(self.will[0], stdin=subprocess.DEVNULL, timeout=60, check=False)


if __name__ == "__main__":
    StandIn(sys.argv[1], Path(sys.argv[2])).run()
