"""Decompose-K under `torch.compile`: `enable()` rewrites the products of models, `report()` says which and why."""

from decompose_k.inductor.autotuning import Autotuned, autotune
from decompose_k.inductor.generated import Generated
from decompose_k.inductor.inspection import Inspection, inspect_product
from decompose_k.inductor.report import Decision, Report
from decompose_k.inductor.slots import Installed
from decompose_k.inductor.switch import disable, enable, is_enabled, report

__all__ = [
    "Autotuned",
    "Decision",
    "Generated",
    "Inspection",
    "Installed",
    "Report",
    "autotune",
    "disable",
    "enable",
    "inspect_product",
    "is_enabled",
    "report",
]
