"""The finiteness test that reading and packing share."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

# dtype -> (its bits as an integer, the mask of its exponent: all set in just NaN and infinities)
_EXPONENTS: dict[np.dtype[Any], tuple[np.dtype[Any], int]] = {
    np.dtype(np.float32): (np.dtype(np.uint32), 0x7F800000),
    np.dtype(np.float16): (np.dtype(np.uint16), 0x7C00),
    np.dtype(ml_dtypes.bfloat16): (np.dtype(np.uint16), 0x7F80),
}


def all_finite(values: npt.NDArray[Any]) -> bool:
    """Whether no element of a contiguous float32, float16 or bfloat16 array is NaN or infinite.

    It reads the bits, which is several times faster than `np.isfinite` on 16-bit types.
    """
    bits, exponent = _EXPONENTS[values.dtype]
    return not ((values.view(bits) & exponent) == exponent).any()
