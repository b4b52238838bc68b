"""Every collective of a group once, as text: for ranks that are threads, and for ranks that are processes."""

import numpy as np

from skuda.tools.ranks.framework import BF16


def collectives(group, framework, seed):
    """Return the bits that a rank of three gets; the parts are uneven, and one is empty."""
    rng = np.random.default_rng(seed)
    sizes = (2, 0, 3)
    whole = [rng.integers(-(2**24), 2**24, (5, 4), np.int32) for _ in range(3)]
    mine, begin = whole[group.rank], sum(sizes[: group.rank])
    part = slice(begin, begin + sizes[group.rank])
    found = [
        group.max(framework.sent(mine.astype(np.float32))),
        group.sum(framework.sent(mine.copy())),
        group.sum_rows(framework.sent(mine.copy()), sizes),
    ]
    for dtype in (np.int8, np.float32, BF16):
        array = whole[0].astype(dtype)
        found.append(group.gather(framework.sent(array[part]), 0, sizes))
        found.append(group.gather(framework.sent(np.ascontiguousarray(array.T[:, part])), 1, sizes))
    texts = group.exchange(f"rank {group.rank}")
    group.agree("the same")
    return repr([framework.fetched(one).tolist() for one in found]) + repr(texts)
