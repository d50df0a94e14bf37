"""Arguments of the LoRA decode kernel that wait for their measurement: docs/kernels.md has the predictions.

The benchmark times them, the tests of the kernel run with each.
"""

from __future__ import annotations

from typing import Any

TUNINGS: dict[str, dict[str, Any]] = {
    "count": {"count": True},
    "zero_page": {"zero_page": True},
    "few_slots": {"few_slots": True},
    "warps": {"warps": True},
    "spread": {"spread": True},
    "mask": {"mask": "windows"},
    "single": {"deltas": 1},
    "pairs": {"pairs": True, "ring": 160, "stages": 2, "deltas": 1},
    "quick": {
        "count": True,
        "zero_page": True,
        "few_slots": True,
        "warps": True,
        "spread": True,
        "mask": "windows",
    },
    "all": {
        "count": True,
        "zero_page": True,
        "warps": True,
        "spread": True,
        "mask": "windows",
        "pairs": True,
        "ring": 160,
        "stages": 2,
        "deltas": 1,
    },
    # As commit 33b6d12 did it: two whole stages, one buffer of products, a row at a time, NaNs spread.
    "earlier": {"pack": False, "deltas": 1, "whole_window": 9, "mask": "never"},
}

# Of one module of few blocks: more under way. With pairs, two thread blocks still fit an SM.
DEEPER: list[dict[str, Any]] = [
    {"stages": 5},
    {"stages": 7, "ring": 144},
    TUNINGS["quick"] | {"stages": 5},
    TUNINGS["all"] | {"stages": 3, "ring": 144},
]
