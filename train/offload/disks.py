"""A rank's store of blocks on its disks, as its run is configured."""

from functools import partial
from pathlib import Path

import torch.distributed as dist

from contract.errors import ConfigError
from contract.run_folder import Event, RunFolder
from train.config import TrainConfig
from train.monitor.progress import tell
from train.offload.nvme.leftovers import Identity
from train.offload.nvme.settings import NvmeSettings
from train.offload.nvme.store import NvmeStore


def store_of(config: TrainConfig, role: str) -> NvmeStore:
    """Return a store for what `role` ("optimizer", "parameters") keeps on this rank's disks; it is not open yet.

    What a disk does that people should know is said, and left in the events of the run. Raises `ConfigError` for
    settings that are none, or that do not go with the run's limits.
    """
    paths = [Path(path) for path in config.offload.nvme_path]
    given = config.offload.nvme_settings
    # A folder that is not there is told of when it is opened.
    where = Path(given) if given is not None else paths[0] if paths[0].is_dir() else None
    settings = NvmeSettings() if where is None else NvmeSettings.load(where)
    limit_s = config.resilience.step_timeout_s
    if settings.limit_s >= limit_s:
        raise ConfigError(
            f"a disk may hang for limit_s={settings.limit_s:g} s before that is an error, and a step for "
            f"resilience.step_timeout_s={limit_s:g} s, which would fire first without naming the disk: raise "
            f"resilience.step_timeout_s, or lower limit_s in {where or 'a file for offload.nvme_settings'}"
        )
    identity = Identity.of(config.run_folder.path, dist.get_rank(), role)
    alarm = partial(_alarm, config.run_folder, dist.get_rank())
    return NvmeStore(paths, identity, settings, checksum=config.offload.nvme_checksums, alarm=alarm)


def _alarm(run: RunFolder, rank: int, text: str) -> None:
    tell(text)
    run.try_event(Event.WARNING, rank=rank, reason=text)
