"""What the Slurm of a profile says: its settings, its partitions, the accounts of the user. A short answer or none."""

import getpass
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from contract.errors import UserError
from slurm.client import Answer, ask, clean_environment
from slurm.sites.detect import NOT_CONFIGURED, scheduler_environment

_FIELD = re.compile(r"(\w+)=(\S*)")
Record = Mapping[str, str]


@dataclass
class SlurmSays:
    """Answers of one Slurm, each asked for once."""

    profile: str
    environ: Mapping[str, str]

    @cached_property
    def complaint(self) -> str:
        """Why `scontrol show config` says nothing; empty if it does."""
        return "" if self._config.code == 0 else self._config.sentence

    @property
    def is_configured(self) -> bool:
        """Whether this host knows of a Slurm, if one that does not answer."""
        return self._config.code is None or not NOT_CONFIGURED.search(self._config.error)

    @property
    def cluster(self) -> str | None:
        """What the Slurm that answers calls itself."""
        return (self.config or {}).get("ClusterName")

    @cached_property
    def _config(self) -> Answer:
        return self._ask("scontrol", "show", "config")

    @cached_property
    def config(self) -> Record | None:
        """Of `scontrol show config`; None where it does not answer."""
        if self._config.code != 0:
            return None
        return dict(re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", self._config.output, re.MULTILINE))

    @cached_property
    def partitions(self) -> Mapping[str, Record] | None:
        """By name; None where Slurm does not answer."""
        answer = self._ask("scontrol", "--oneliner", "show", "partition")
        if answer.code != 0:
            return None
        records = [dict(_FIELD.findall(line)) for line in answer.output.splitlines()]
        return {record["PartitionName"]: record for record in records if "PartitionName" in record}

    @cached_property
    def accounts(self) -> Sequence[str] | None:
        """That the user may charge; None where the accounting does not answer, or does not know the user."""
        command = ("sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={self._user}")
        answer = self._ask(*command, "format=account")
        found = answer.output.split() if answer.code == 0 else []
        return list(dict.fromkeys(found)) or None

    @property
    def _user(self) -> str:
        try:
            return getpass.getuser()
        except (KeyError, OSError):  # a user without a name
            return "nobody"

    def _ask(self, *command: str) -> Answer:
        return ask(list(command), self._clean)

    @cached_property
    def _clean(self) -> Mapping[str, str]:
        clean = clean_environment(self.environ)
        try:
            return {**clean, **scheduler_environment(self.profile, self.environ)}
        except UserError:  # no lab is up: whoever asks it is told so
            return clean
