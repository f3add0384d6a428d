"""The plans of all ranks as one, in which every chunk is written once.

Every rank writes about the same bytes.

Ranks whose outlines are equal are a cohort, tensors of one kind with the same holders a bundle: boxes,
holders and checks are those of a bundle, so that the work grows with bundles and ranks, not with chunks. (DCP
counts a shard as the bytes of the whole tensor, and assigns tensors in their given order, so that a large one
at the end is added to an even load.)

Chunks of one name on several ranks may still differ: the holders are recorded, so that the values can be
compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ckpt_core.errors import OWN_NAMES, ConfigError
from ckpt_core.formats.consistency import ImpossibleError, check_boxes
from ckpt_core.formats.dcp_metadata import item_bytes
from ckpt_core.formats.index import Boxes, Index, Ints, Numbers, Path, Places, Properties, TensorIn
from ckpt_core.messages import message
from ckpt_core.names import KEPT, data_name

ENTRY_BYTES: Final = 4096
"""Nominal bytes of an entry beside its payload; of a byte entry, of unknown size, in all."""
SPLIT_BYTES: Final = 64 << 20
"""A larger chunk that several ranks hold is written by several, in blocks of rows."""
_MOST_LISTED: Final = 5

GroupNames: TypeAlias = Mapping[tuple[str | int, ...], Sequence[tuple[str, ...]]]
"""Path of a list of parameter groups in the nested state -> the names in each group."""
Kind: TypeAlias = tuple[Properties, tuple[int, ...], tuple[int, int] | None, bool]
"""Properties and shape of a tensor; of its mesh the number of ranks, and a number that identifies it; whether
its shards can be written in blocks of rows."""
_Form: TypeAlias = tuple[str, tuple[int, ...]] | None
"""Dtype and shape of a tensor; None of a byte entry."""


@message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """What a rank could write of one part, but for its boxes.

    It is equal on all ranks of a mesh.

    Attributes:
        paths: of the leaves of the nested state.
        leaf: int32, position of the leaf of each item.
        kind: int32, position in `kinds` of each item; -1 of a byte entry.
        kinds: tensors of one kind have the same box.
    """

    paths: Sequence[Path] = ()
    leaf: bytes = b""
    kind: bytes = b""
    kinds: Sequence[Kind] = ()


_NOTHING: Final = Outline()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LocalPlan:
    """All writes that a rank could make.

    `boxes` has start and sizes of each kind, int64.
    """

    outline: Outline = _NOTHING
    boxes: bytes = b""


@message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class WriteTask:
    """One rank's share of the writes of one part.

    Attributes:
        share: a bit for each item of its plan, set if it writes it whole; None if it writes all.
        blocks: position of an item of which it writes some rows, the first of them and their number.
        kept: positions in its plan of entries that it writes under a separate name, because another rank
            writes the entry itself.
        replicas: group -> positions in its plan, int32, of the entries that all ranks of the group hold.
        renamed: its names -> the names in the checkpoint, where they differ.
    """

    share: bytes | None = None
    blocks: Sequence[tuple[int, int, int]] = ()
    kept: Sequence[int] = ()
    replicas: Mapping[int, bytes] = field(default_factory=dict[int, bytes])
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])

    def places(self, num_items: int) -> Sequence[int]:
        """Return the positions of the items that the rank writes whole."""
        if self.share is None:
            return range(num_items)
        bits = np.unpackbits(np.frombuffer(self.share, np.uint8), count=num_items)
        found: list[int] = np.flatnonzero(bits).tolist()
        return found


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """Names of chunks with the same holders, one copy per holder."""

    ranks: tuple[int, ...]
    names: Sequence[str]


@final
@dataclass(eq=False, slots=True)
class _Cohort:
    """Ranks with one outline.

    Attributes:
        name: of each item, into all names.
        boxes: start and sizes of each kind, int64 [ranks, values]; `ends` of each kind in it.
        writes: whether a rank writes an item whole, bool [ranks, items].
        column: of each item, into `box`, the row of each rank in the boxes of the tensor.
    """

    ranks: Ints
    kinds: Sequence[Kind]
    kind: Numbers
    name: Numbers
    boxes: Ints
    ends: list[int]
    writes: npt.NDArray[np.bool_]
    column: Numbers
    box: list[Numbers] = field(default_factory=list["Numbers"])


@final
@dataclass(eq=False, slots=True)
class _Entry:
    """The items of a bundle in one cohort, in order of the names."""

    cohort: _Cohort
    kind: int
    positions: Ints

    @property
    def form(self) -> _Form:
        if self.kind < 0:
            return None
        properties, shape, _, _ = self.cohort.kinds[self.kind]
        return properties[0], shape

    @property
    def mesh(self) -> tuple[int, int] | None:
        return None if self.kind < 0 else self.cohort.kinds[self.kind][2]

    @property
    def box(self) -> Ints:
        """Starts and sizes, int64 [ranks, 2, dimensions]."""
        dims = 0 if self.kind < 0 else len(self.cohort.kinds[self.kind][1])
        end = self.cohort.ends[self.kind]
        return self.cohort.boxes[:, end - 2 * dims : end].reshape(len(self.cohort.ranks), 2, dims)


@final
class _Bundle:
    """Entries of the state that are held alike.

    Of each holding of a box, ordered by rank: `rank`, `entry` (position in `entries`) and `box`. Boxes are
    ordered by their lowest holder, `first`. Blocks are what is written: boxes, or rows of one.

    Attributes:
        names: of the entries, into all names.
        parents: the box of each block, and `low` the first row of the block in it.
        writers: int64 [names, blocks].

    Raises:
        ConfigError: ranks hold one entry with different dtypes, shapes or kinds.
    """

    def __init__(
        self, names: Ints, entries: Sequence[_Entry], all_names: Sequence[str], *, alike: bool
    ) -> None:
        self.names, self.entries, self.alike = names, entries, alike
        self.label = all_names[names[0]]
        rank = np.concatenate([each.cohort.ranks for each in entries])
        order = np.argsort(rank, kind="stable")
        self.rank = rank[order]
        counts = [len(each.cohort.ranks) for each in entries]
        self.entry = np.repeat(np.arange(len(entries)), counts)[order]
        self.forms = list(dict.fromkeys(each.form for each in entries))
        dims = max(0 if form is None else len(form[1]) for form in self.forms)
        # Dimensions and start, by which chunks differ; form and sizes, which must be alike.
        columns = np.full((len(rank), 2, 1 + dims), -1, np.int64)
        for each, end in zip(entries, np.cumsum(counts).tolist(), strict=True):
            own, box = columns[end - len(each.cohort.ranks) : end], each.box
            own[:, 0, 0], own[:, 1, 0] = box.shape[2] if each.kind >= 0 else -1, self.forms.index(each.form)
            own[:, :, 1 : 1 + box.shape[2]] = box
        columns = columns[order]
        self.first, self.box = _distinct(columns[:, 0])
        unlike = np.flatnonzero((columns[:, 1] != columns[self.first[self.box], 1]).any(axis=1))
        if alike and len(unlike):
            at, lowest = int(unlike[0]), int(self.first[self.box[unlike[0]]])
            raise ConfigError(
                f"rank {self.rank[at]} has {self._described(columns[at, 1])} as {self.label}, "
                f"rank {self.rank[lowest]} {self._described(columns[lowest, 1])}; "
                f"an entry must be alike on all ranks that have it. {OWN_NAMES}"
            )
        self.held = np.bincount(self.box)
        own = columns[self.first]
        self.form_of_box = own[:, 1, 0]
        form = self.form
        self.starts, self.sizes = own[:, :, 1 : 1 + (0 if form is None else len(form[1]))].swapaxes(0, 1)
        self.parents, self.low = np.arange(len(self.first)), np.zeros(len(self.first), np.int64)
        self.writers = np.empty((0, 0), np.int64)

    @property
    def form(self) -> _Form:
        """Dtype and shape as the lowest holder has them."""
        return self.forms[int(self.form_of_box[0])]

    def _described(self, column: Ints) -> str:
        form = self.forms[column[0]]
        if form is None:
            return "a value that is not a tensor"
        dtype, shape = form
        sizes = tuple(column[1 : 1 + len(shape)].tolist())
        return f"{dtype} {shape}{'' if sizes == shape else f', of which it holds {sizes}'}"

    def holdings(self) -> Iterator[tuple[int, Ints]]:
        """Yield the boxes that several ranks hold, each with its holdings."""
        ends = np.cumsum(self.held)
        rows = np.argsort(self.box, kind="stable")
        for box in np.flatnonzero(self.held > 1).tolist():
            yield box, rows[ends[box] - self.held[box] : ends[box]]

    def check_meshes(self) -> None:
        """Refuse entries that cannot be copies of one tensor because their meshes differ."""
        meshes = [each.mesh for each in self.entries]
        if not self.alike or len(set(meshes)) == 1 or self.held.max() == 1:
            return
        on: dict[Any, list[int]] = {}
        for rank, entry in dict(zip(self.rank.tolist(), self.entry.tolist(), strict=True)).items():
            on.setdefault(meshes[entry], []).append(rank)
        # Copies on meshes without a common rank may be of one tensor: comparing their values decides.
        if None in on or any(mesh[0] != len(ranks) for mesh, ranks in on.items()):
            described = "; ".join(
                f"ranks {ranks} have "
                f"{'a plain tensor' if mesh is None else f'a DTensor on a mesh of {mesh[0]} rank(s)'}"
                for mesh, ranks in on.items()
            )
            raise ConfigError(
                f"{self.label} cannot be the same tensor on all ranks: {described}. {OWN_NAMES}"
            )

    def split(self) -> None:
        """Cut large boxes that several ranks hold into blocks of rows."""
        if not self.alike or self.form is None or not self.form[1]:
            return
        if not all(each.cohort.kinds[each.kind][3] for each in self.entries):
            return
        rows = self.sizes[:, 0]
        cuts = np.minimum(np.minimum(self.held, rows), -(-self.size_bytes() // SPLIT_BYTES)).clip(1)
        self.parents = np.repeat(self.parents, cuts)
        at = np.arange(len(self.parents)) - np.repeat(np.cumsum(cuts) - cuts, cuts)
        self.low, high = (edge * rows[self.parents] // cuts[self.parents] for edge in (at, at + 1))
        self.starts, self.sizes = self.starts[self.parents], self.sizes[self.parents]
        if len(at) > len(cuts):
            self.starts[:, 0] += self.low
            self.sizes[:, 0] = high - self.low

    def size_bytes(self) -> Ints:
        item = 0 if self.form is None else item_bytes(self.form[0])
        volume: Ints = np.prod(self.sizes, axis=1, dtype=np.int64)
        return volume * item

    def problems(self, all_names: Sequence[str]) -> list[str]:
        """Describe what of the shards does not make up the tensors, by name."""
        other = np.flatnonzero(self.form_of_box != self.form_of_box[0])
        if len(other):
            own, first = (
                "a plain value" if form is None else f"{form[0]} {form[1]}"
                for form in (self.forms[self.form_of_box[other[0]]], self.form)
            )
            return [f"{all_names[name]} is {own} on one rank and {first} on another" for name in self.names]
        if self.form is None:
            return []
        found: list[str] = []
        for name in self.names.tolist():
            try:
                check_boxes(all_names[int(name)], self.form[1], Boxes(self.starts, self.sizes))
            except ImpossibleError as error:
                found.append(str(error))
            else:
                break  # it is the same for all
        return found


def _distinct(rows: Ints) -> tuple[Ints, Ints]:
    """Return the first of each distinct row, and for each row its distinct one."""
    _, first, which = np.unique(rows, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return first[order], number[which.reshape(-1)]


@final
class PlannedIndex:
    """What plans make of `.metadata`: `index`, without the places in the files."""

    def __init__(self, index: Index, cohorts: Sequence[_Cohort], more: Mapping[int, _More]) -> None:
        self.index, self._more = index, more
        self._ranks = {rank: (each, at) for each in cohorts for at, rank in enumerate(each.ranks.tolist())}

    def located(self, lengths: Sequence[Sequence[Ints]]) -> Index:
        """Return the index with the places in the data files of every rank.

        `lengths` has by rank the bytes of the chunks in its file of tensors, and in that of byte entries.

        Raises:
            ValueError: these are not the chunks that were planned.
        """
        columns: list[tuple[Any, ...]] = []
        files: list[str] = []
        for rank, sizes in enumerate(lengths):
            for number, ((name, box), size) in enumerate(zip(self._written(rank), sizes, strict=True)):
                if len(size) != len(name):
                    raise ValueError(f"rank {rank} wrote {len(size)} chunks of the {len(name)} planned")
                if len(name):
                    file = np.full(len(name), len(files), np.int32)
                    columns.append((name, box, file, np.cumsum(size) - size, size))
                    files.append(data_name(rank, number))
        none = np.empty(0, np.int32), np.empty(0, np.int64)
        name, box, file, offset, length = (
            np.concatenate(each) for each in zip((*none[:1] * 3, *none[1:] * 2), *columns, strict=True)
        )
        places = Places(name=name, box=box, file=file, files=files, offset=offset, length=length)
        return replace(self.index, places=places)

    def _written(self, rank: int) -> Iterator[tuple[Numbers, Numbers]]:
        """Yield names and boxes of what a rank writes: tensors, then byte entries."""
        cohort, at = self._ranks[rank]
        items = np.flatnonzero(cohort.writes[at])
        boxes = np.array([each[at] for each in cohort.box], np.int32)
        is_value = cohort.kind[items] < 0
        for own, more in zip(
            (items[~is_value], items[is_value]), self._more.get(rank, ((), ())), strict=True
        ):
            added = np.array(more, np.int32).reshape(-1, 2)
            yield (
                np.concatenate([cohort.name[own], added[:, 0]]),
                np.concatenate([boxes[cohort.column[own]], added[:, 1]]),
            )


_More: TypeAlias = tuple[list[tuple[int, int]], list[tuple[int, int]]]
"""Name and box of what a rank writes beside whole items: of tensors, and of byte entries."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The writes of one part by rank, its index, and what several ranks hold."""

    tasks: list[WriteTask]
    planned: PlannedIndex
    replicas: list[Replicas]


def decide(
    plans: Sequence[LocalPlan],
    rank_local: Collection[str] = (),
    *,
    groups: Sequence[GroupNames] = (),
    replicas: Literal["spread", "lowest", "kept"] = "spread",
) -> Decision:
    """Assign every chunk to one rank, and describe the part. Coordinator only.

    Of the chunks that several ranks hold, the largest first, each goes to its holder with the fewest bytes to
    write so far, unreplicated ones included; among equally loaded ranks to the lowest. A chunk of more than
    `SPLIT_BYTES` is several, blocks of rows. Equal plans give equal results everywhere.

    Replicas of entries with `rank_local` names may differ: the lowest rank that has them writes them. Other
    replicas are written by any of their holders, all by the lowest, or by each of them: the lowest under
    their name, the others under separate names. `groups` are each rank's, identified by the names in them.

    Raises:
        ConfigError: replicas differ in dtype, shape or kind.
        ValueError: the ranks' shards overlap, leave holes, exceed their tensor, or differ in dtype or shape.
    """
    named, renamed = renumber(plans, groups)
    cohorts, names, paths = _cohorts(named)
    bundles = list(_bundles(cohorts, names, rank_local))
    for bundle in bundles:
        bundle.check_meshes()
    if problems := [problem for bundle in bundles for problem in bundle.problems(names)]:
        beyond = f", and {len(problems) - _MOST_LISTED} more" if len(problems) > _MOST_LISTED else ""
        raise ValueError(f"the shards do not make up the state: {'; '.join(problems[:_MOST_LISTED])}{beyond}")
    shared, places = _replicas(bundles, names, len(plans))
    for bundle in bundles if replicas == "spread" else ():
        bundle.split()
    _choose(bundles, len(plans), spread=replicas == "spread")
    blocks, more = _write(bundles)
    entries = _entries(bundles, len(names))
    kept: list[list[int]] = [[] for _ in plans]
    if replicas == "kept":
        for rank, own in enumerate(places):
            others = [content for group, content in own.items() if shared[group].ranks[0] != rank]
            kept[rank] = numbers(b"".join(others)).tolist()
        for rank, name, entry in _kept(cohorts, kept):
            more.setdefault(rank, ([], []))[entry is None].append((len(names), -1 if entry is None else 0))
            paths.append(kept_path(rank, names[name]))
            names.append(kept_name(rank, names[name]))
            entries.append(entry)
    return Decision(
        tasks=[
            WriteTask(
                share=share,
                blocks=blocks.get(rank, ()),
                kept=kept[rank],
                replicas=places[rank],
                renamed=renamed[rank],
            )
            for rank, share in enumerate(_shares(cohorts, len(plans)))
        ],
        planned=PlannedIndex(Index(names, entries, paths), cohorts, more),
        replicas=shared,
    )


def _cohorts(plans: Sequence[LocalPlan]) -> tuple[list[_Cohort], list[str], list[Path]]:
    """Group the ranks; return the names, too, in order of appearance, and their paths."""
    members: dict[int, list[int]] = {}
    for rank, plan in enumerate(plans):
        members.setdefault(id(plan.outline), []).append(rank)
    known: dict[str, int] = {}
    paths: list[Path] = []
    cohorts: list[_Cohort] = []
    for ranks in members.values():
        outline = plans[ranks[0]].outline
        leaf, kind = (numbers(each) for each in (outline.leaf, outline.kind))
        of_leaf = np.full(len(outline.paths), -1, np.int32)
        for at in np.unique(leaf).tolist():
            path = outline.paths[at]
            number = of_leaf[at] = known.setdefault(name_of(path), len(paths))
            if number == len(paths):
                paths.append(path)
        boxes = np.frombuffer(b"".join(plans[rank].boxes for rank in ranks), np.int64)
        cohorts.append(
            _Cohort(
                ranks=np.array(ranks, np.int64),
                kinds=outline.kinds,
                kind=kind,
                name=of_leaf[leaf],
                boxes=boxes.reshape(len(ranks), -1),
                ends=np.cumsum([2 * len(shape) for _, shape, _, _ in outline.kinds]).tolist() or [0],
                writes=np.zeros((len(ranks), len(kind)), np.bool_),
                column=np.zeros(len(kind), np.int32),
            )
        )
    return cohorts, list(known), paths


def _bundles(
    cohorts: Sequence[_Cohort], names: Sequence[str], rank_local: Collection[str]
) -> Iterator[_Bundle]:
    """Bundle the names of which the same cohorts have items of the same kinds."""
    lengths = [len(each.name) for each in cohorts]
    cohort = np.repeat(np.arange(len(cohorts)), lengths)
    name, kind = (
        np.concatenate([np.empty(0, np.int32), *(getattr(each, column) for each in cohorts)])
        for column in ("name", "kind")
    )
    starts = np.cumsum(lengths) - lengths
    rows = np.argsort(name, kind="stable")
    counts = np.bincount(name, minlength=len(names))
    ends = np.cumsum(counts)
    local = np.array([each in rank_local for each in names], np.int64)
    for count in np.unique(counts).tolist():
        own = np.flatnonzero(counts == count)
        items = rows[(ends[own] - count)[:, None] + np.arange(count)]
        _, which = _distinct(np.hstack([local[own, None], cohort[items], kind[items]]).astype(np.int64))
        members = np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1])
        for at in members:
            entries = [
                _Entry(cohorts[int(number)], int(kind[lowest]), items[at, column] - starts[number])
                for column, lowest in enumerate(items[at[0]])
                for number in (cohort[lowest],)
            ]
            yield _Bundle(own[at], entries, names, alike=not local[own[at[0]]])


def _replicas(
    bundles: Sequence[_Bundle], names: Sequence[str], num_ranks: int
) -> tuple[list[Replicas], list[dict[int, bytes]]]:
    """Group what several ranks hold by the holders; return each rank's positions, too."""
    found: dict[tuple[int, ...], list[tuple[_Bundle, Ints]]] = {}
    for bundle in bundles:
        for _, rows in bundle.holdings() if bundle.alike else ():
            found.setdefault(tuple(bundle.rank[rows].tolist()), []).append((bundle, bundle.entry[rows]))
    listed: dict[tuple[int, ...], list[str]] = {}
    places: list[dict[int, bytes]] = [{} for _ in range(num_ranks)]
    groups: list[Replicas] = []
    for number, (ranks, held) in enumerate(found.items()):
        key = tuple(id(bundle) for bundle, _ in held)
        if key not in listed:
            listed[key] = [names[int(each)] for bundle, _ in held for each in bundle.names.tolist()]
        groups.append(Replicas(ranks=ranks, names=listed[key]))
        first, which = _distinct(np.stack([entry for _, entry in held], axis=1))
        contents = [
            np.concatenate([bundle.entries[int(entry[at])].positions for bundle, entry in held])
            .astype(np.int32)
            .tobytes()
            for at in first
        ]
        for rank, at in zip(ranks, which.tolist(), strict=True):
            places[rank][number] = contents[at]
    return groups, places


def _choose(bundles: Sequence[_Bundle], num_ranks: int, *, spread: bool) -> None:
    """Choose the writers of blocks: the lowest holder, or that with the fewest bytes."""
    loads = np.zeros(num_ranks, np.int64)
    free: list[tuple[int, int, int, _Bundle, int, Ints, Ints]] = []
    for bundle in bundles:
        sizes, lowest = bundle.size_bytes() + ENTRY_BYTES, bundle.rank[bundle.first[bundle.parents]]
        several = (bundle.held[bundle.parents] > 1) & (spread and bundle.alike)
        np.add.at(loads, lowest[~several], sizes[~several] * len(bundle.names))
        bundle.writers = np.broadcast_to(lowest, (len(bundle.names), len(lowest)))
        if several.any():
            bundle.writers = bundle.writers.copy()
            free += _free(bundle, sizes, np.flatnonzero(several))
    for size, _, _, bundle, at, blocks, holders in sorted(free, key=lambda each: each[:3]):
        chosen = holders[np.arange(len(blocks)), loads[holders].argmin(axis=1)]
        bundle.writers[at, blocks] = chosen
        loads[chosen] -= size


def _free(
    bundle: _Bundle, sizes: Ints, blocks: Ints
) -> Iterator[tuple[int, int, int, _Bundle, int, Ints, Ints]]:
    """Yield what is assigned at once: blocks of one size without common holders.

    Each is its negated size, its lowest rank, the position there, the tensor, its blocks and their holders.
    """
    rows = dict(bundle.holdings())
    alike: dict[tuple[int, int], list[int]] = {}
    for block, size in zip(blocks.tolist(), sizes[blocks].tolist(), strict=True):
        alike.setdefault((size, int(bundle.held[bundle.parents[block]])), []).append(block)
    for (size, _), each in alike.items():
        holders = bundle.rank[np.stack([rows[int(bundle.parents[block])] for block in each])]
        disjoint = len(np.unique(holders)) == holders.size
        for own in [slice(None)] if disjoint else [slice(at, at + 1) for at in range(len(each))]:
            block, lowest = np.array(each[own]), int(holders[own][0, 0])
            entry = bundle.entries[int(bundle.entry[rows[int(bundle.parents[block[0]])][0]])]
            for at, position in enumerate(entry.positions.tolist()):
                yield -size, lowest, position, bundle, at, block, holders[own]


def _write(bundles: Sequence[_Bundle]) -> tuple[dict[int, list[tuple[int, int, int]]], dict[int, _More]]:
    """Enter what each rank writes into the cohorts; return its blocks of rows."""
    blocks: dict[int, list[tuple[int, int, int]]] = {}
    more: dict[int, _More] = {}
    for bundle in bundles:
        cuts = np.bincount(bundle.parents)
        head = np.cumsum(cuts) - cuts
        for number, entry in enumerate(bundle.entries):
            cohort, box = entry.cohort, bundle.box[bundle.entry == number]
            writes = (bundle.writers[:, head[box]] == cohort.ranks) & (cuts[box] == 1)
            cohort.writes[:, entry.positions] = writes.T
            cohort.column[entry.positions] = len(cohort.box)
            cohort.box.append((head[box] if entry.kind >= 0 else np.full(len(box), -1)).astype(np.int32))
        for block in np.flatnonzero(cuts[bundle.parents] > 1).tolist():
            of_rank = {
                int(bundle.rank[row]): row for row in np.flatnonzero(bundle.box == bundle.parents[block])
            }
            span = int(bundle.low[block]), int(bundle.sizes[block, 0])
            for at, rank in enumerate(bundle.writers[:, block].tolist()):
                position = bundle.entries[bundle.entry[of_rank[rank]]].positions[at]
                blocks.setdefault(rank, []).append((int(position), *span))
                more.setdefault(rank, ([], []))[0].append((int(bundle.names[at]), block))
    return blocks, more


def _entries(bundles: Sequence[_Bundle], number: int) -> list[TensorIn | None]:
    """Describe every name; equal entries, and equal boxes, are one object."""
    entries: list[TensorIn | None] = [None] * number
    same: dict[Any, Any] = {}
    for bundle in bundles:
        if bundle.form is not None:
            content = bundle.starts.shape, bundle.starts.tobytes(), bundle.sizes.tobytes()
            boxes = same.setdefault(content, Boxes(bundle.starts, bundle.sizes))
            lowest = bundle.entries[int(bundle.entry[0])]
            properties, shape, _, _ = lowest.cohort.kinds[lowest.kind]
            entry = same.setdefault((properties, shape, id(boxes)), TensorIn(properties, shape, boxes))
            for name in bundle.names.tolist():
                entries[name] = entry
    return entries


def _kept(
    cohorts: Sequence[_Cohort], kept: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, TensorIn | None]]:
    """Yield the ranks' own values: rank, name, and what they are as whole entries."""
    rows = ((cohort, at, rank) for cohort in cohorts for at, rank in enumerate(cohort.ranks.tolist()))
    for cohort, at, rank, position in ((*row, position) for row in rows for position in kept[row[2]]):
        kind, name = int(cohort.kind[position]), int(cohort.name[position])
        if kind < 0:
            yield rank, name, None
            continue
        properties, shape, _, _ = cohort.kinds[kind]
        size = cohort.boxes[at, cohort.ends[kind] - len(shape) : cohort.ends[kind]]
        yield rank, name, TensorIn(properties, tuple(size.tolist()), Boxes(0 * size[None], size[None]))


def _shares(cohorts: Sequence[_Cohort], num_ranks: int) -> list[bytes | None]:
    shares: list[bytes | None] = [None] * num_ranks
    for cohort in cohorts:
        for rank, own in zip(cohort.ranks.tolist(), cohort.writes, strict=True):
            shares[rank] = None if own.all() else np.packbits(own).tobytes()
    return shares


def renumber(
    plans: Sequence[LocalPlan], groups: Sequence[GroupNames]
) -> tuple[list[LocalPlan], list[dict[str, str]]]:
    """Number the parameter groups of all ranks.

    Return the plans with the names of the checkpoint, and for each rank its names -> those, where they
    differ.
    """
    moved: list[dict[int, Path]] = [{} for _ in plans]
    known: dict[Any, Any] = {}
    for path in dict.fromkeys(path for of_rank in groups for path in of_rank):
        lists = [of_rank.get(path, ()) for of_rank in groups]
        if len({tuple(each) for each in lists if each}) < 2:
            continue
        numbers: dict[tuple[object, ...], int] = {}
        for rank, own in enumerate(lists):
            new = [numbers.setdefault(tuple(names) or (at,), len(numbers)) for at, names in enumerate(own)]
            key = id(plans[rank].outline), path, tuple(new)
            if key not in known:
                known[key] = _moved(plans[rank].outline, path, new)
            moved[rank] |= known[key]
    renamed: list[dict[str, str]] = []
    named: list[LocalPlan] = []
    for plan, changes in zip(plans, moved, strict=True):
        paths = plan.outline.paths
        renamed.append({name_of(paths[at]): name_of(path) for at, path in changes.items()})
        same = id(plan.outline), tuple(changes.items())
        if same not in known:
            changed = [changes.get(at, path) for at, path in enumerate(paths)]
            known[same] = replace(plan.outline, paths=changed) if changes else plan.outline
        named.append(replace(plan, outline=known[same]))
    return named, renamed


def _moved(outline: Outline, path: Path, new: Sequence[int]) -> dict[int, Path]:
    """Return the new paths of the leaves in parameter groups with other numbers."""
    depth = len(path)
    return {
        leaf: (*path, new[at], *each[depth + 1 :])
        for leaf, each in enumerate(outline.paths)
        if each[:depth] == path and len(each) > depth and isinstance(at := each[depth], int) and new[at] != at
    }


def numbers(content: bytes) -> Numbers:
    """Return the int32 numbers of a message."""
    return np.frombuffer(content, np.int32)


def name_of(path: Path) -> str:
    """Return DCP's flattened name of a leaf."""
    return ".".join(map(str, path))


def kept_name(rank: int, name: str) -> str:
    """Return the flattened name of a rank's own value of the entry `name`."""
    return ".".join(kept_path(rank, name))


def kept_path(rank: int, name: str) -> tuple[str, str, str]:
    """Return the path, in the nested state, of a rank's own value of the entry `name`."""
    return KEPT, f"{rank:05d}", name
