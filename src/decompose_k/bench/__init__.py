"""Benchmarks: cases, variants and measuring give rows; summary, plots and report are made from rows alone."""
