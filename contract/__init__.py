"""What `slurm/` and `train/` share: exit codes, the run folder, and errors meant for users.

Standard library only, so that a login node and a rank can both import it for nothing.
"""
