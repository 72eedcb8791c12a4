"""The NVMe tier: blocks of a rank in files on local disks, moved by direct I/O in the background.

`store.py` puts the parts together: `plan` (what lies where), `volume` (files in a folder that `leftovers` owns),
`threads` (who moves bytes) and `settings` (how large and how many). `pool` has the buffers. Only `pool` imports torch.
"""
