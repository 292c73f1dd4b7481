"""Who keeps copies of a snapshot: spares, other machines, whoever has room."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.run.copies import DISK_RESERVE, Copy, Keeper, Owned, choose_copies
from atoll.protocol.ids import PeerId

A, B, C, D = (PeerId(name) for name in "abcd")


def owned(peer: PeerId, *names: str, num_bytes: int = 100) -> Owned:
    return Owned(peer=peer, names=frozenset(names), num_bytes=num_bytes)


def targets(copies: tuple[Copy, ...]) -> list[tuple[str, str]]:
    return [(copy.source, copy.target) for copy in copies]


def test_spares_come_first() -> None:
    keepers = [Keeper(peer=A, spare=False), Keeper(peer=B, spare=False), Keeper(peer=C, spare=True)]
    assert targets(choose_copies([owned(A, "x"), owned(B, "y")], keepers, 1)) == [(A, C), (B, C)]


def test_without_spares_those_with_a_stage_keep_one_another_s() -> None:
    keepers = [Keeper(peer=A, spare=False), Keeper(peer=B, spare=False)]
    assert targets(choose_copies([owned(A, "x"), owned(B, "y")], keepers, 1)) == [(A, B), (B, A)]


def test_another_machine_is_better_than_the_same() -> None:
    keepers = [
        Keeper(peer=A, spare=False, machine="one"),
        Keeper(peer=B, spare=False, machine="one"),
        Keeper(peer=C, spare=False, machine="two"),
    ]
    assert targets(choose_copies([owned(A, "x")], keepers, 1)) == [(A, C)]


def test_the_load_is_spread_by_what_owners_let_peers_receive() -> None:
    keepers = [Keeper(peer=C, spare=True, bytes_per_second=1e6), Keeper(peer=D, spare=True, bytes_per_second=4e6)]
    parts = [owned(PeerId(f"p{index}"), f"x{index}") for index in range(5)]
    chosen = [target for _, target in targets(choose_copies(parts, keepers, 1))]
    assert (chosen.count("c"), chosen.count("d")) == (1, 4)


def test_a_disk_without_room_is_left_alone() -> None:
    keepers = [Keeper(peer=B, spare=False), Keeper(peer=C, spare=True, disk_bytes=100)]
    assert targets(choose_copies([owned(A, "x")], keepers, 1)) == [(A, B)]


def test_what_somebody_has_already_is_not_copied_again() -> None:
    keepers = [Keeper(peer=peer, spare=True) for peer in (A, B, C)]
    shared = [owned(A, "x", "tied"), owned(B, "y", "tied")]
    copies = choose_copies(shared, keepers, 1)
    assert {name for copy in copies for name in copy.names} == {"x", "y"}
    assert choose_copies([owned(A, "x"), owned(B, "x")], keepers, 1) == ()


@given(
    num_owners=st.integers(1, 4),
    num_spares=st.integers(0, 4),
    copies=st.integers(0, 3),
    disks=st.lists(st.sampled_from([0, 50, 150, 1000]), min_size=8, max_size=8),
)
def test_each_name_has_its_copies_as_far_as_there_are_peers_and_room(
    num_owners: int, num_spares: int, copies: int, disks: list[int]
) -> None:
    parts = [owned(PeerId(f"o{index}"), f"x{index}", f"y{index}") for index in range(num_owners)]
    keepers = [Keeper(peer=part.peer, spare=False, disk_bytes=disks[index]) for index, part in enumerate(parts)]
    keepers += [Keeper(peer=PeerId(f"s{index}"), spare=True, disk_bytes=disks[4 + index]) for index in range(num_spares)]
    chosen = choose_copies(parts, keepers, copies)
    assert chosen == choose_copies(parts, keepers, copies)
    used: dict[PeerId, int] = {}
    for copy in chosen:
        assert copy.source != copy.target
        used[copy.target] = used.get(copy.target, 0) + copy.num_bytes
    for keeper in keepers:
        assert not keeper.disk_bytes or used.get(keeper.peer, 0) <= (1.0 - DISK_RESERVE) * keeper.disk_bytes
    for part in parts:
        for name in part.names:
            holders = [copy.target for copy in chosen if name in copy.names]
            assert len(holders) == len(set(holders))
            assert len(holders) <= copies
            if not any(keeper.disk_bytes for keeper in keepers):
                assert len(holders) == min(copies, len(keepers) - 1)
