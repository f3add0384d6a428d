"""The position of training in its data, on the same ranks and on others.

For any torch `DataLoader`, whatever its sampler, workers or generator; the order of its data stays the same:

    position = LoaderPosition(loader)          # before it is iterated
    saved = position.state()                   # plain values, per rank; at any batch, or between epochs
    notes = position.restore(saved)            # in another process: the next iter(loader) goes on from there

A position is what the epoch began from (generators, seeds, epoch numbers), and how many batches were handed
out. On the same ranks the epoch is begun again from that, and skips those batches by their indices: no sample
is fetched. On another number of ranks, or with another batch size, the samples seen by all ranks together are
counted, and the others dealt out in the order in which the epoch began: see `EpochOrder`, which can be used
alone. Iterable data sets go on by a state of their own, or draw again what they had handed out.

A host that draws ahead of the loop says how many batches it draws at once. The rest of an order, or of a
stream that ranks share, is dealt as that host deals a whole one.
"""

from ckpt_core.data._hidden import batches_in, is_stateful, keeps_iterator, tell_of_missing
from ckpt_core.data._position import EpochOrder, LoaderPosition, await_training, in_samples
from ckpt_core.data._tracking import hidden_position, track, untrack

__all__ = [
    "EpochOrder",
    "LoaderPosition",
    "await_training",
    "batches_in",
    "hidden_position",
    "in_samples",
    "is_stateful",
    "keeps_iterator",
    "tell_of_missing",
    "track",
    "untrack",
]
