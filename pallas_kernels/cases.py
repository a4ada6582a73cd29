"""Every kernel at every real shape."""

from __future__ import annotations

from pallas_kernels.attn_res.cases import cases as attn_res_cases
from pallas_kernels.common.case import Case
from pallas_kernels.grouped_mlp.cases import cases as grouped_mlp_cases
from pallas_kernels.kda.cases import cases as kda_cases
from pallas_kernels.kda.decode_cases import decode_cases as kda_decode_cases
from pallas_kernels.mla.cases import cases as mla_cases
from pallas_kernels.short_conv.cases import cases as short_conv_cases


def all_cases() -> list[Case]:
    parts = (
        attn_res_cases,
        grouped_mlp_cases,
        kda_cases,
        kda_decode_cases,
        mla_cases,
        short_conv_cases,
    )
    return [case for part in parts for case in part()]


def find_case(key: str) -> Case:
    """The case of a key such as 'kda/k3_24_heads_1024_given_g/forward'.

    Raises:
      ValueError: there is none.
    """
    cases = {case.key: case for case in all_cases()}
    if key not in cases:
        raise ValueError(f'no kernel case {key!r}; there are {", ".join(cases)}')
    return cases[key]


def cases_of(prefix: str | None) -> list[Case]:
    """Cases whose key starts with `prefix`; all for None.

    Raises:
      ValueError: there is none.
    """
    if prefix == '':
        raise ValueError('--kernel: got nothing, wanted the start of a case; leave it out for all')
    cases = all_cases()
    chosen = [case for case in cases if prefix is None or case.key.startswith(prefix)]
    if not chosen:
        kernels = sorted({case.kernel for case in cases})
        raise ValueError(f'--kernel={prefix} names no case; kernels: {", ".join(kernels)}')
    return chosen
