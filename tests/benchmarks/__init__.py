"""Benchmarks: they measure and report ratios within one run; they assert nothing."""
