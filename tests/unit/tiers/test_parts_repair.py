"""Disks that only one node sees get back what they lack, and keep what they have."""

from __future__ import annotations

import errno
import json
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from ckpt_core.commit import Catalog, Manifest, Marker, begin, collect_orphans, commit, remove, verify
from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError
from ckpt_core.formats.checksums import checksum
from ckpt_core.groups import GroupedStorage
from ckpt_core.names import EVERY_GROUP, MANIFEST, twin_name
from ckpt_core.root._ownership import settle_parts
from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.testing import Fault, FaultyStorage, Operation
from ckpt_core.tiers import CopyTerms, copy_checkpoint
from ckpt_core.tiers.repairing import CannotRepairError, PartsRepair
from ckpt_core.types import CheckpointInfo, FileEntry
from tests.support.thorough import THOROUGH

NAME = "step-000000007"
ANYWHERE = ("shared.bin", "host/config.json")


def content_of(path: str) -> bytes:
    return path.encode() * 400


def paths_of(group: int) -> list[str]:
    return [f"__{group}_0.distcp", f"chunks-0000{group}.json.z", f"host/weights-{group}.bin"]


class Nodes:
    """A checkpoint on the disks of some nodes, and its copy in a durable tier."""

    def __init__(self, base: Path, groups: int = 2, replicas: int = 1) -> None:
        self.base = base
        self.replicas = replicas
        self.durable = base / "durable"
        self.durable.mkdir()
        self.info = self.save(groups)
        self.before = [tree(self.disk(number)) for number in range(groups)]
        copy_checkpoint(self.root(groups), LocalStorage(self.durable), NAME, CopyTerms())

    def disk(self, number: int) -> Path:
        return self.base / f"node-{number}"

    def root(self, *numbers: int, faults: Sequence[Fault] = ()) -> GroupedStorage:
        """The root of a job on so many disks, or on these."""
        chosen = range(*numbers) if len(numbers) == 1 else numbers
        disks: list[Any] = []
        for number in chosen:
            self.disk(number).mkdir(exist_ok=True)
            disks.append(FaultyStorage(LocalStorage(self.disk(number)), faults))
        storage = GroupedStorage(disks[0])
        storage.join(0, [1] * len(disks), disks[1:])
        return storage

    def save(
        self, groups: int, save_id: str = "0123456789abcdef", *, replace: bool = False
    ) -> CheckpointInfo:
        root = self.root(groups)
        working = begin(root, NAME, save_id, replace=replace)
        placed = [(path, group) for group in range(groups) for path in paths_of(group)]
        if self.replicas > 1:
            placed += [(twin_name(path), (group + 1) % groups) for path, group in placed]
        placed += [(path, EVERY_GROUP) for path in ANYWHERE]
        files = []
        for path, group in placed:
            original = path.removesuffix(twin_name(""))
            content = content_of(save_id + original if replace else original)
            for number, part in enumerate(root.parts):
                if group in {number, EVERY_GROUP}:
                    part.write_bytes(f"{working}/{path}", content)
            files.append(FileEntry(path=path, size_bytes=len(content), checksum=checksum(content)))
        manifest = Manifest(
            save_id=save_id,
            step=7,
            created=1.0,
            world_size=groups,
            replicas=self.replicas,
            files=tuple(files),
            groups=tuple(group for _, group in placed),
        )
        if self.replicas > 1:
            root.parts[-1].write_bytes(f"{working}/{twin_name(MANIFEST)}", manifest.to_bytes())
        return commit(root, working, NAME, manifest, replace=replace)

    def repair(
        self,
        root: GroupedStorage,
        suspects: Collection[str] | None = (),
        *,
        sources: Sequence[Storage] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> PartsRepair:
        durable = [LocalStorage(self.durable)]
        repair = PartsRepair(root, self.info, durable if sources is None else sources, lambda: None)
        repair.look(suspects)
        if repair.is_needed:
            repair.run(CopyTerms(), check=check)
        return repair

    def settled(self, root: GroupedStorage) -> None:
        """What the next start of the job does."""
        settle_parts(root.parts)
        collect_orphans(root, keep=())


def tree(place: Path) -> dict[str, bytes]:
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


@pytest.fixture
def nodes(tmp_path: Path) -> Nodes:
    return Nodes(tmp_path)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(bytes(content))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def lose(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


Harm: TypeAlias = tuple[Callable[[Path], None], str]
WHAT: list[tuple[str, list[Harm]]] = [
    ("a disk is new", [(lose, "node-1")]),
    ("the disk of the coordinator is new", [(lose, "node-0")]),
    ("all disks are new", [(lose, "node-0"), (lose, "node-1")]),
    ("a part is missing", [(lose, f"node-1/{NAME}")]),
    ("a file is missing", [(lose, f"node-1/{NAME}/__1_0.distcp")]),
    ("a directory is missing", [(lose, f"node-0/{NAME}/host")]),
    ("a file is short", [(cut, f"node-0/{NAME}/__0_0.distcp")]),
    ("a file is damaged", [(flip, f"node-1/{NAME}/host/weights-1.bin")]),
    ("files are damaged on both", [(flip, f"node-{n}/{NAME}/__{n}_0.distcp") for n in (0, 1)]),
    *(
        (f"{name} {how.__name__} on {place}", [(how, f"{place}/{NAME}/{name}")])
        for name in ("COMMITTED", "manifest.json", "shared.bin")
        for how, place in ((flip, "node-0"), (lose, "node-1"))
    ),
    ("no marker is left", [(lose, f"node-{n}/{NAME}/COMMITTED") for n in (0, 1)]),
    ("no manifest is left", [(flip, f"node-{n}/{NAME}/manifest.json") for n in (0, 1)]),
    ("a disk is new, and the other damaged", [(lose, "node-1"), (flip, f"node-0/{NAME}/shared.bin")]),
]
SUSPECTS = ("__0_0.distcp", "__1_0.distcp", "host/weights-1.bin")


@pytest.mark.parametrize("harm", [harm for _, harm in WHAT], ids=[what for what, _ in WHAT])
def test_each_disk_has_again_what_it_had(nodes: Nodes, harm: Sequence[Harm]):
    for act, place in harm:
        act(nodes.base / place)
    root = nodes.root(2)
    assert nodes.repair(root, SUSPECTS).is_needed
    assert [tree(nodes.disk(number)) for number in (0, 1)] == nodes.before
    assert verify(root, NAME) == []
    assert not nodes.repair(root, None).is_needed


def test_only_what_no_disk_has_is_read_from_the_durable_tier(nodes: Nodes):
    lose(nodes.disk(1))
    durable = FaultyStorage(LocalStorage(nodes.durable))
    repair = nodes.repair(nodes.root(2), sources=[durable])
    read = {each.key.removeprefix(f"{NAME}/") for each in durable.operations if each.method == "read_into"}
    assert read == set(paths_of(1))
    assert repair.size_bytes == sum(len(content_of(path)) for path in [*paths_of(1), *ANYWHERE])


def test_what_every_disk_has_needs_no_further_tier(nodes: Nodes):
    flip(nodes.disk(0) / NAME / "shared.bin")
    nodes.repair(nodes.root(2), sources=[])
    assert tree(nodes.disk(0)) == nodes.before[0]


@pytest.mark.parametrize("lost", [0, 1])
def test_with_twins_a_lost_disk_needs_no_further_tier(tmp_path: Path, lost: int):
    nodes = Nodes(tmp_path, replicas=2)
    root = nodes.root(2)
    assert not nodes.repair(root, None).is_needed
    lose(nodes.disk(lost))
    nodes.repair(nodes.root(2), sources=[])
    second = {f"{NAME}/{twin_name(MANIFEST)}"}
    for number in (0, 1):
        now, before = tree(nodes.disk(number)), nodes.before[number]
        assert {path: now[path] for path in before} == before
        assert now.keys() - before.keys() <= second
    assert verify(root, NAME) == []
    assert not nodes.repair(root, None).is_needed


def test_a_damaged_tier_is_passed_over_file_by_file(nodes: Nodes, tmp_path: Path):
    shutil.copytree(nodes.durable, tmp_path / "further")
    flip(nodes.durable / NAME / "__1_0.distcp")
    flip(tmp_path / "further" / NAME / "__0_0.distcp")
    lose(nodes.disk(0))
    lose(nodes.disk(1))
    root = nodes.root(2)
    nodes.repair(root, sources=[LocalStorage(nodes.durable), LocalStorage(tmp_path / "further")])
    assert [tree(nodes.disk(number)) for number in (0, 1)] == nodes.before


def test_without_a_whole_copy_nothing_gets_a_name(nodes: Nodes):
    lose(nodes.disk(1))
    flip(nodes.durable / NAME / "__1_0.distcp")
    with pytest.raises(CorruptCheckpointError, match=r"__1_0\.distcp"):
        nodes.repair(nodes.root(2))
    assert tree(nodes.disk(0)) == nodes.before[0]
    assert not (nodes.disk(1) / NAME).exists()


def test_files_of_the_user_stay(nodes: Nodes):
    mine = nodes.disk(1) / NAME / "host" / "notes.txt"
    mine.write_text("mine")
    flip(nodes.disk(1) / NAME / "__1_0.distcp")
    nodes.repair(nodes.root(2), None)
    assert tree(nodes.disk(1)) == {**nodes.before[1], f"{NAME}/host/notes.txt": b"mine"}


def _other_save(disk: Path) -> None:
    marker = disk / NAME / "COMMITTED"
    content = Marker.from_bytes(marker.read_bytes())
    manifest = Manifest(save_id="f" * 16, step=7, created=1.0, world_size=1)
    marker.write_bytes(Marker.of(manifest, b"other", groups=content.groups).to_bytes())


def _users_directory(disk: Path) -> None:
    lose(disk / NAME)
    (disk / NAME).mkdir()
    (disk / NAME / "__1_0.distcp").write_text("mine")


def _link(disk: Path) -> None:
    (disk / NAME).rename(disk / "elsewhere")
    (disk / NAME).symlink_to("elsewhere")


def _directory_for_file(disk: Path) -> None:
    (disk / NAME / "__1_0.distcp").unlink()
    (disk / NAME / "__1_0.distcp").mkdir()


@pytest.mark.parametrize("harm", [_other_save, _users_directory, _link, _directory_for_file])
def test_what_is_not_a_part_of_it_is_not_touched(nodes: Nodes, harm: Any):
    harm(nodes.disk(1))
    lose(nodes.disk(0) / NAME / "__0_0.distcp")
    before = [tree(nodes.disk(number)) for number in (0, 1)]
    with pytest.raises(CannotRepairError):
        nodes.repair(nodes.root(2))
    assert [tree(nodes.disk(number)) for number in (0, 1)] == before


def test_a_checkpoint_of_one_place_is_not_repaired_on_several_disks(nodes: Nodes):
    for number in (0, 1):
        lose(nodes.disk(number))
    path = nodes.durable / NAME / "manifest.json"
    manifest = json.loads(path.read_bytes())
    del manifest["groups"]
    content = json.dumps(manifest).encode()
    path.write_bytes(content)
    marker = Marker.of(Manifest.from_bytes(content), content)
    (nodes.durable / NAME / "COMMITTED").write_bytes(marker.to_bytes())
    nodes.info = marker.info(NAME)
    with pytest.raises(CannotRepairError, match="saved in one place"):
        nodes.repair(nodes.root(2))
    shutil.copytree(nodes.durable / NAME, nodes.disk(1) / NAME)
    assert not nodes.repair(nodes.root(2), None).is_needed


@pytest.mark.parametrize("now", [(1, 0), (0, 2), (2, 0, 1), (0, 1, 2, 3)], ids=str)
def test_on_other_disks_than_at_the_save_the_files_of_a_group_stay_together(
    tmp_path: Path, now: tuple[int, ...]
):
    """Nodes in another order, and fewer or more than at the save; nodes 1 and 3 are new."""
    nodes = Nodes(tmp_path, groups=3)
    lose(nodes.disk(1))
    root = nodes.root(*now)
    nodes.repair(root)
    assert verify(root, NAME) == []
    assert Catalog(root).survey().parts == []
    there = [{path for path in tree(nodes.disk(number)) if path.startswith(NAME)} for number in now]
    for group in range(3):
        files = {f"{NAME}/{path}" for path in paths_of(group)}
        assert sorted(len(files & each) for each in there)[-2:] == [0, 3]
    for number in {0, 2} & {*now}:
        assert nodes.before[number].items() <= tree(nodes.disk(number)).items()
    markers = {tree(nodes.disk(number))[f"{NAME}/COMMITTED"] for number in now}
    assert len(markers) == 1
    assert not nodes.repair(root, None).is_needed


def test_a_part_is_never_taken_for_a_whole_checkpoint(nodes: Nodes):
    """Node 0 was alone for a while, and has all of it; node 1 is new."""
    lose(nodes.disk(0))
    lose(nodes.disk(1))
    nodes.disk(0).mkdir()
    shutil.copytree(nodes.durable / NAME, nodes.disk(0) / NAME)
    nodes.repair(nodes.root(2))
    for number, groups in ((0, 1), (1, 2)):
        alone = LocalStorage(nodes.disk(number))
        assert Marker.read(alone, NAME).groups == groups
        assert len(Catalog(alone).survey().parts) == number


@pytest.mark.parametrize("when", ["before it gets a name", "while its marker is written"])
def test_it_is_given_up_where_retention_removed_the_checkpoint_meanwhile(nodes: Nodes, when: str):
    lose(nodes.disk(1))
    root = nodes.root(2)

    def prune(_: object = None) -> None:
        remove(root, nodes.info)

    late = [Fault(method="create", key="*/COMMITTED", before=prune)]
    repairing = nodes.root(2, faults=late if when == "while its marker is written" else [])
    with pytest.raises(CheckpointNotFoundError, match="pruned or replaced"):
        nodes.repair(repairing, check=prune if when == "before it gets a name" else lambda: None)
    nodes.settled(root)
    assert [tree(nodes.disk(number)) for number in (0, 1)] == [{}, {}]


@pytest.mark.parametrize(
    "harm", [(lose, "__1_0.distcp"), (flip, "shared.bin"), (lose, "")], ids=["file", "shared", "part"]
)
def test_a_save_that_took_the_name_meanwhile_is_not_touched(nodes: Nodes, harm: Any):
    act, place = harm
    act(nodes.disk(1) / NAME / place)
    root = nodes.root(2)
    with pytest.raises(CheckpointNotFoundError, match="pruned or replaced"):
        nodes.repair(root, check=lambda: nodes.save(2, "fedcba9876543210", replace=True) and None)
    nodes.settled(root)
    assert Catalog(root).marker(NAME).save_id == "fedcba9876543210"
    assert verify(root, NAME) == []
    assert all(path.startswith(NAME) for number in (0, 1) for path in tree(nodes.disk(number)))


class Renames(threading.Thread):
    """Another thread of the job, which renames a checkpoint."""

    def __init__(self, root: GroupedStorage) -> None:
        super().__init__(daemon=True)
        self.root = root
        self.done = threading.Event()

    def run(self) -> None:
        self.root.rename("held", "later")
        self.done.set()


def test_no_other_thread_renames_while_files_take_their_place(nodes: Nodes):
    """Otherwise a save could give the name to another checkpoint between two of them."""
    root = nodes.root(2)
    other = Renames(root)
    with root.names_held():
        other.start()
        assert not other.done.wait(0.05)
        root.rename(NAME, "held")
    assert other.done.wait(60)
    assert root.directories("") == {"later"}


HARMS: Mapping[str, Sequence[Harm]] = {
    "new": [(lose, "node-1")],
    "all new": [(lose, "node-0"), (lose, "node-1")],
    "damaged": [(flip, f"node-1/{NAME}/__1_0.distcp"), (cut, f"node-0/{NAME}/shared.bin")],
}
STRIDE = 1 if THOROUGH else 9
CHANGES = {"create", "close", "replace", "delete", "make_directory", "sync_directory", "rename", "exchange"}


@pytest.mark.parametrize(("how", "first"), [("killed", 1), ("a node is lost", 5)])
@pytest.mark.parametrize("harm", HARMS)
def test_whenever_it_ends_each_disk_has_at_least_what_it_had(nodes: Nodes, harm: str, how: str, first: int):
    """And every file that counts is the one committed; the next repair finds the rest."""
    for act, place in HARMS[harm]:
        act(nodes.base / place)
    left = nodes.base / "left"
    left.mkdir()
    had = []
    for number in (0, 1):
        nodes.disk(number).mkdir(exist_ok=True)
        shutil.copytree(nodes.disk(number), left / f"{number}")
        found = tree(nodes.disk(number))
        had.append({path for path, content in found.items() if nodes.before[number][path] == content})

    def ended_at(place: int) -> bool:
        """Repair what was left, up to one change of a disk; whether there were so many."""
        for number in (0, 1):
            shutil.rmtree(nodes.disk(number))
            shutil.copytree(left / f"{number}", nodes.disk(number))
        remaining = iter(range(place))

        def end(operation: Operation):
            if operation.method in CHANGES and next(remaining, None) is None:
                raise SystemExit if how == "killed" else ConnectionResetError(errno.ECONNRESET, "lost")

        try:
            nodes.repair(nodes.root(2, faults=[Fault(before=end)]), SUSPECTS)
        except (SystemExit, OSError):
            return True
        return False

    place = first
    while ended_at(place):
        root = nodes.root(2)
        nodes.settled(root)
        for number in (0, 1):
            now = tree(nodes.disk(number))
            right = {path for path, content in now.items() if nodes.before[number].get(path) == content}
            assert had[number] <= right, place
            assert not [path for path in now if not path.startswith(NAME)], place
        with suppress(CheckpointNotFoundError):
            assert Catalog(root).marker(NAME).save_id == nodes.info.save_id
        nodes.repair(root, SUSPECTS)
        assert [tree(nodes.disk(number)) for number in (0, 1)] == nodes.before, place
        place += STRIDE
    assert place > first
