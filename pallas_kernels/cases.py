"""Every kernel at every real shape."""

from __future__ import annotations

from pallas_kernels.common.case import Case
from pallas_kernels.kda.cases import cases as kda_cases


def all_cases() -> list[Case]:
    return [*kda_cases()]
