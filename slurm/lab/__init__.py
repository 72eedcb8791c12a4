"""A real multi-node Slurm on one host, for tests and for learning.

Every node is a `slurmd` in namespaces of its own, with its own host name, address, /dev/shm and process
tree, under one `slurmctld`. Nothing is installed or changed on the host and root is not needed where the
kernel lets users make namespaces.
"""

from slurm.lab.cluster import Lab, LabStatus, down, status, up
from slurm.lab.folder import default_folder
from slurm.lab.settings import LabSettings

__all__ = ["Lab", "LabSettings", "LabStatus", "default_folder", "down", "status", "up"]
