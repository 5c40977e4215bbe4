"""The numbers that dropout draws, written out."""

from __future__ import annotations

import numpy as np


def philox_keep(seed: int, B: int, H: int, T_q: int, T_kv: int, dropout_p: float) -> np.ndarray:
    """(B, H, T_q, T_kv): what the kernels keep, by Philox 4x32-7 (Salmon et al., SC 2011).

    The four words of a call belong to the queries and keys that differ in bit 3.
    """
    key_index, query_index, head = np.broadcast_arrays(
        np.arange(T_kv, dtype=np.uint64)[None, None, :],
        np.arange(T_q, dtype=np.uint64)[None, :, None],
        np.arange(B * H, dtype=np.uint64)[:, None, None],
    )
    bit = np.uint64(8)
    word = (query_index & bit) // 4 + (key_index & bit) // bit
    c0, c1, c2, c3 = key_index & ~bit, query_index & ~bit, head, np.zeros_like(head)
    k0, k1 = np.uint64(seed & 0xFFFFFFFF), np.uint64(seed >> 32)
    low = np.uint64(0xFFFFFFFF)
    for _ in range(7):
        product0, product1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ k0,
            product1 & low,
            (product0 >> np.uint64(32)) ^ c3 ^ k1,
            product0 & low,
        )
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    bits = np.choose(word.astype(np.int64), (c0, c1, c2, c3))
    keep = (bits >> np.uint64(1)) >= int(dropout_p * 2**31)
    return keep.reshape(B, H, T_q, T_kv)
