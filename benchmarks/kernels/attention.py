"""Cases of the attention kernels."""

from kernels.common import Case

CASES: list[Case] = []
