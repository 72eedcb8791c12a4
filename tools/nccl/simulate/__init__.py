"""Fabrics that exist in memory only, with faults planted in them: what the analysis is tested on."""
