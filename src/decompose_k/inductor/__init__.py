"""Decompose-K under `torch.compile`: `enable()` rewrites the products of models, `report()` says which and why."""

from decompose_k.inductor.install import Enabled, disable, enable, is_enabled, report
from decompose_k.inductor.report import Decision, Report

__all__ = ["Decision", "Enabled", "Report", "disable", "enable", "is_enabled", "report"]
