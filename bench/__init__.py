"""Benchmarks: commands whose results are kept in ``bench/results``."""
